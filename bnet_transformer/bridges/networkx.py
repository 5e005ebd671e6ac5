"""The template graph and the ground graph as networkx graphs, node-link JSON and Parquet.

Other exports and figures read only these graphs, because the attributes of nodes (role, slice, word, kind, label, ...)
contain all that they need.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.checks import check_choice, check_float, check_int
from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer._core.naming import WORD, format_label
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, FileError
from bnet_transformer.graph import GroundGraph, NodeSelection
from bnet_transformer.inference import SentenceState, arrow_weights, iter_arrow_weights

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd


MAX_ARROWS = 100_000
MAX_WEIGHTED_ARROWS = 2_000_000  # before those below `min_weight` are left out
HEAD_PLATE = "head"
HEADER = {"format": "bnet_transformer graph", "version": 1}

ArrowWeights = Mapping[tuple[int, int], float]


# graphs


def template_graph_to_networkx(network: Network) -> nx.MultiDiGraph:
    """Build the template graph: one node for each node group, one arrow for each slot of a child.

    Attributes of nodes: stack, role, slice, plates, kind, learnable, shape, tpm, label. Attributes of arrows: role (of
    the parent), slot, reach and pick. `pick` maps a plate of the parent to the selector whose state selects an entry
    along it; the arrow of the selector has the slot `pick`.

    Args:
        network: The net.

    Returns:
        The graph.
    """
    import networkx as nx

    graph = nx.MultiDiGraph()
    for spec in network.specs:
        group = spec.group
        label = format_label(group.role, stack=group.stack, slice=group.slice)
        words = () if group.word_stack is None else (WORD,)
        graph.add_node(group.name, **_get_group_attributes(spec), plates=(*group.plates, *words), label=label)
    groups = network.graph.groups
    for spec in network.specs:
        arrows = [(p.index, p.slot, str(p.reach), {plate: groups[k].name for plate, k in p.pick}) for p in spec.parents]
        selectors = dict.fromkeys(index for p in spec.parents for _, index in p.pick)
        for index, slot, reach, pick in [*arrows, *((index, "pick", "same", {}) for index in selectors)]:
            parent = groups[index]
            graph.add_edge(parent.name, spec.group.name, role=parent.role, slot=slot, reach=reach, pick=pick)
    return graph


def ground_graph_to_networkx(
    network: Network,
    ground: GroundGraph,
    *,
    selection: NodeSelection | None = None,
    tokens: Mapping[str, Sequence[str]] | None = None,
    observed: Collection[int] = (),
    weights: ArrowWeights | None = None,
    min_weight: float | None = None,
    limit: int | None = MAX_ARROWS,
) -> nx.DiGraph:
    """Build the ground graph of a sentence, or a selection of it.

    Attributes of nodes: role, stack, slice, head, plates, index (along each of the plates), word, token, kind
    (`deterministic`, `stochastic`, `observed`), learnable, shape, tpm, label. Attributes of arrows: role (of the
    parent) and, if `weights` contains the arrow, weight.

    Args:
        network: The net.
        ground: The ground graph.
        selection: The nodes and arrows to include; None for all.
        tokens: The words of each stack.
        observed: The ids of the observed nodes.
        weights: The weights of arrows by `(parent, child)`.
        min_weight: The minimum weight of an arrow; arrows with a smaller weight are left out.
        limit: The maximum number of arrows, without those left out; it is checked before the graph is built. None for
            no limit.

    Returns:
        The graph.

    Raises:
        BudgetError: If there are more arrows than `limit`.
    """
    selection = selection or NodeSelection()
    weak = 0 if weights is None or min_weight is None else sum(weight < min_weight for weight in weights.values())
    check_arrow_limit(ground, selection, limit, num_weak=weak)
    import networkx as nx

    graph = nx.DiGraph()
    for spec in network.specs:
        if ground.is_selected(spec.group, selection):
            graph.add_nodes_from(iter_nodes(ground, spec, selection, tokens or {}, observed))
    names: NDArray[np.object_] = np.array(ground.names, dtype=object)
    groups = network.graph.groups
    for edge, sources, targets in ground.arrows(selection):
        role, arrows = groups[edge.parent].role, zip(names[sources].tolist(), names[targets].tolist(), strict=True)
        if weights is None:
            graph.add_edges_from(arrows, role=role)
            continue
        for arrow, ids in zip(arrows, zip(sources.tolist(), targets.tolist(), strict=True), strict=True):
            weight = weights.get(ids)
            if weight is None:
                graph.add_edge(*arrow, role=role)
            elif min_weight is None or weight >= min_weight:
                graph.add_edge(*arrow, role=role, weight=float(weight))
    return graph


def sentence_to_networkx(
    state: SentenceState,
    *,
    weights: bool = True,
    slices: int | Collection[int] | None = None,
    words: object = None,
    heads: int | Collection[int] | None = None,
    attention: bool = False,
    min_weight: float | None = None,
    limit: int | None = MAX_ARROWS,
) -> nx.DiGraph:
    """Build the ground graph of a sentence, or a part of it.

    Args:
        state: The sentence.
        weights: True includes selectors and weights.
        slices: The slices to include; None for all.
        words: The words to include; None for all.
        heads: The heads to include; None for all.
        attention: True adds a `weight` to arrows of attention: `P(j | i)`, averaged over the posterior of the latent
            choices.
        min_weight: The minimum weight of an arrow; None for no minimum.
        limit: The maximum number of arrows; None for no limit.

    Returns:
        The graph.

    Raises:
        BudgetError: If more arrows than `limit` remain.
    """
    selection = select_part(
        state, weights=weights, slices=slices, words=words, heads=heads, attention=attention, min_weight=min_weight
    )
    max_arrows = limit
    if limit is not None and min_weight is not None:
        max_arrows = max(check_int("limit", limit, minimum=0), MAX_WEIGHTED_ARROWS)
    check_arrow_limit(state.ground, selection, max_arrows)  # before the attention is computed
    needs_weights = attention or min_weight is not None
    weights_by_arrow = arrow_weights(state.query(), state.evaluator, selection) if needs_weights else None
    return ground_graph_to_networkx(
        state.network,
        state.ground,
        selection=selection,
        tokens=state.tokens,
        observed=state.evidence.keys(),
        weights=weights_by_arrow,
        min_weight=min_weight,
        limit=limit,
    )


def select_part(
    state: SentenceState, *, attention: bool, min_weight: float | None, weights: bool = True, **part: Any
) -> NodeSelection:
    """Validate the options of a graph that are common to all its formats, and select its nodes."""
    check_choice("weights", weights, (True, False))
    check_choice("attention", attention, (True, False))
    selection = state.selection(weights=weights, **part)
    if min_weight is not None and not 0.0 <= check_float("min_weight", min_weight) <= 1.0:
        raise BNetError("min_weight", expected="a probability from 0 to 1", actual=min_weight)
    return selection


def check_arrow_limit(
    ground: GroundGraph, selection: NodeSelection, limit: int | None = MAX_ARROWS, *, num_weak: int = 0
) -> None:
    """Raise an error for more arrows than the limit, without `num_weak` arrows. The arrows are counted, not built."""
    if limit is None:
        return
    arrows = ground.count_arrows(selection) - num_weak
    if arrows > check_int("limit", limit, minimum=0):
        expected = f"at most {limit:,} arrows (each becomes a Python object)"
        actual = f"{ground.count_nodes(selection):,} nodes and {arrows:,} arrows"
        hint = f"Select fewer slices, words or plates, or raise limit={arrows} (limit=None for no limit)"
        raise BudgetError("networkx graph", expected=expected, actual=actual, hint=hint)


def get_display_kind(spec: NodeSpec) -> str:
    """Return the kind of a node in figures and exported graphs: observed, deterministic or stochastic."""
    return {"input": "observed", "deterministic": "deterministic"}.get(spec.tpm.kind, "stochastic")


def _get_group_attributes(spec: NodeSpec) -> dict[str, Any]:
    """Return the attributes that all nodes of a group share."""
    return {
        "stack": spec.group.stack,
        "role": spec.group.role,
        "slice": spec.group.slice,
        "kind": get_display_kind(spec),
        "learnable": spec.learnable,
        "shape": spec.shape,
        "tpm": type(spec.tpm).__name__,
    }


def iter_nodes(
    ground: GroundGraph,
    spec: NodeSpec,
    selection: NodeSelection,
    tokens: Mapping[str, Sequence[str]],
    observed: Collection[int],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the nodes of a group with their attributes."""
    group = spec.group
    axes = ground.axes(group)
    head_axis = axes.index(HEAD_PLATE) if HEAD_PLATE in axes else None
    inner = len(group.plates)
    stack_tokens = None if group.word_stack is None else tokens.get(group.word_stack)
    common = _get_group_attributes(spec) | {"plates": axes}
    axis_indices = ground.select_indices(group, selection).values()
    ids = ground.select_nodes(group, selection).tolist()
    for node, index in zip(ids, itertools.product(*(axis.tolist() for axis in axis_indices)), strict=True):
        word = index[-1] if group.word_stack is not None else None
        # Writers of graphs accept only built-in types.
        token = None if stack_tokens is None or word is None else str(stack_tokens[word])
        label = format_label(
            group.role, stack=group.stack, slice=group.slice, plates=index[:inner], word=word, token=token
        )
        head = None if head_axis is None else index[head_axis]
        local = {"index": index, "head": head, "word": word, "token": token, "label": label}
        local["do"] = node in ground.cut_nodes or node in ground.retained_parents
        if node in observed:
            local["kind"] = "observed"
        yield ground.names[node], common | local


def to_json(graph: nx.Graph) -> str:
    """Convert a graph to node-link JSON. networkx reads it back as the same graph, but tuples become lists.

    Args:
        graph: The graph.

    Returns:
        The JSON text.

    Raises:
        BNetError: If a weight is not finite.

    >>> import networkx as nx
    >>> g = nx.DiGraph([("x_0_0", "q_0_0", {"role": "x", "weight": 0.5})])
    >>> nx.utils.graphs_equal(nx.node_link_graph(json.loads(to_json(g)), edges="edges"), g)
    True
    """
    import networkx as nx

    try:
        return json.dumps(HEADER | nx.node_link_data(graph, edges="edges"), allow_nan=False)
    except ValueError as error:
        raise BNetError("graph", expected="finite numbers", actual=str(error)) from error


# --------------------------------------------------------------------------------------------------------------------
# The template graph of a net and the ground graph of a sentence as a folder of two Parquet files.
#
# `nodes.parquet` has a row for each node and `arrows.parquet` a row for each arrow, with the attributes of the networkx
# graphs. The arrows of a sentence are written from the integer arrays of the ground graph, so that a sentence may have
# millions of them.


NODES, ARROWS = "nodes.parquet", "arrows.parquet"
MAX_PARQUET_ARROWS = 100_000_000  # about 5 GB of memory


def is_folder(path: object) -> bool:
    """True for the path of a folder: it ends in a separator, or is an existing folder without a suffix."""
    checked = as_path(path)
    return os.fspath(path).endswith(("/", os.sep)) or (not checked.suffix and checked.is_dir())  # type: ignore[call-overload]


def write_template_graph(network: Network, folder: object) -> None:
    """Write the template graph of a net.

    Args:
        network: The net.
        folder: The folder; it is created if it does not exist.

    Raises:
        BNetError: pyarrow is not installed.
        FileError: The folder cannot be written.
    """
    import pandas as pd

    graph = template_graph_to_networkx(network)
    edges = graph.edges(data=True)
    arrows = [{"source": u, "target": v, **data, "pick": list(data["pick"].items())} for u, v, data in edges]
    columns = ["source", "target", "role", "slot", "reach", "pick"]
    _write_folder(folder, graph.nodes(data=True), pd.DataFrame(arrows, columns=columns))


def write_ground_graph(
    state: SentenceState,
    folder: object,
    *,
    attention: bool = False,
    min_weight: float | None = None,
    limit: int | None = MAX_PARQUET_ARROWS,
    **part: Any,
) -> None:
    """Write the ground graph of a sentence, or a part of it.

    Args:
        state: The sentence.
        folder: The folder; it is created if it does not exist.
        attention: True adds the column `weight`: `P(j | i)`, averaged over the posterior of the latent choices; it is
            null for arrows that are no attention.
        min_weight: The minimum weight of an arrow; None for no minimum.
        limit: The maximum number of arrows, before those of smaller weights are left out; None for no limit.
        **part: The options `weights`, `slices`, `words` and `heads` of `sentence_to_networkx`.

    Raises:
        BNetError: pyarrow is not installed.
        BudgetError: If there are more arrows than `limit`.
        FileError: The folder cannot be written.
    """
    import pandas as pd

    ground, groups = state.ground, state.network.graph.groups
    selection = select_part(state, attention=attention, min_weight=min_weight, **part)
    check_arrow_limit(ground, selection, limit)
    specs = [spec for spec in state.network.specs if ground.is_selected(spec.group, selection)]
    nodes = [iter_nodes(ground, spec, selection, state.tokens, state.evidence.keys()) for spec in specs]
    has_weights = attention or min_weight is not None
    arrows: Iterable[Any] = ((*arrow, None) for arrow in ground.arrows(selection))
    if has_weights:
        arrows = iter_arrow_weights(state.query(), state.evaluator, selection)
    parts = [(*[np.empty(0, dtype=np.int64)] * 3, np.empty(0))]
    for edge, sources, targets, values in arrows:
        weights = np.full(len(sources), np.nan) if values is None else values
        is_strong = ~(weights < (min_weight or 0.0))  # True for arrows without a weight, NaN
        parents = np.full(len(sources), edge.parent)
        parts.append(tuple(column[is_strong] for column in (sources, targets, parents, weights)))
    sources, targets, parents, weights = map(np.concatenate, zip(*parts, strict=True))
    names, roles = pd.CategoricalDtype(ground.names), list(dict.fromkeys(group.role for group in groups))
    frame = pd.DataFrame(
        {
            "source": pd.Categorical.from_codes(sources, dtype=names),
            "target": pd.Categorical.from_codes(targets, dtype=names),
            "role": pd.Categorical.from_codes(np.array([roles.index(g.role) for g in groups])[parents], roles),
        }
    )
    if has_weights:
        frame["weight"] = weights
    _write_folder(folder, itertools.chain(*nodes), frame)


def _write_folder(folder: object, nodes: Iterable[tuple[str, dict[str, Any]]], arrows: pd.DataFrame) -> None:
    """Write both files; neither file is replaced before both are complete."""
    import pandas as pd

    try:
        import pyarrow as pa
    except ImportError as error:
        hint = 'Run pip install "bnet-transformer[parquet]"'
        subject = "a folder of Parquet files requires the package pyarrow, which is not installed"
        raise BNetError(subject, hint=hint) from error
    path = as_path(folder)
    is_new = not path.exists()
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise FileError(str(folder), expected="a folder that can be created", actual=error.strerror) from error
    # As objects, missing integers remain integers. Without the schema of Arrow, readers return strings, no categories.
    frames = {NODES: pd.DataFrame([{"name": name, **data} for name, data in nodes], dtype=object), ARROWS: arrows}
    try:
        with contextlib.ExitStack() as files:
            for name, frame in frames.items():
                frame.to_parquet(
                    files.enter_context(atomic_write(path / name)), engine="pyarrow", index=False, store_schema=False
                )
    except BaseException as error:
        if is_new:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, UnicodeEncodeError | pa.ArrowInvalid):
            raise BNetError("graph", expected="text that UTF-8 can contain", actual=str(error)) from error
        raise

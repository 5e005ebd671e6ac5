"""The JSON of MIB's circuit track (Mueller et al. 2025): edges from a writer to a reader, with scores.

The format is that of `Graph.to_json` of the package EAP-IG: `{"cfg": ..., "nodes": {name: {"in_graph": bool}}, "edges":
{"a0.h1->m2": {"score": float, "in_graph": bool}}}`. Its writers are `input`, `a{slice}.h{head}` and `m{slice}`; its
readers are `a{slice}.h{head}<q>` (also `<k>` and `<v>`), `m{slice}` and `logits`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.circuits.runs import join_names, split_name
from bnet_transformer.reference import GroundModel

CONVENTIONS = ("mib",)
# Names here and their counterparts there. Rows of one side have distinct patterns, so that both directions are unique.
WRITERS = (
    (re.compile(r"x_0"), "input", re.compile(r"input"), "x_0"),
    (re.compile(r"a_(\d+)_(\d+)"), r"a\1.h\2", re.compile(r"a(\d+)\.h(\d+)"), r"a_\1_\2"),
    (re.compile(r"f_(\d+)"), r"m\1", re.compile(r"m(\d+)"), r"f_\1"),
)
READERS = (
    (re.compile(r"([qkv])_(\d+)_(\d+)"), r"a\2.h\3<\1>", re.compile(r"a(\d+)\.h(\d+)<([qkv])>"), r"\3_\1_\2"),
    (re.compile(r"f_(\d+)"), r"m\1", re.compile(r"m(\d+)"), r"f_\1"),
    (re.compile(r"y"), "logits", re.compile(r"logits"), "y"),
)
MIB_SEPARATOR = "->"


class StoredCircuit(NamedTuple):
    """A circuit that was read from a file.

    Attributes:
        edges: The names of the edges of the circuit, for `bt.circuit(edges=)`.
        scores: The score of each edge, for `bt.faithfulness_curves(scores=)`.
    """

    edges: tuple[str, ...]
    scores: Mapping[str, float]


def to_mib_name(name: str) -> str:
    """The name of an edge in MIB's format.

    >>> to_mib_name("a_0_1 -> q_2_3"), to_mib_name("x_0 -> f_1"), to_mib_name("f_3 -> y")
    ('a0.h1->a2.h3<q>', 'input->m1', 'm3->logits')
    """
    source, target = split_name(name)
    ends = [_translate(end, table, 0) for end, table in ((source, WRITERS), (target, READERS))]
    if None in ends:
        hint = "The format has edges from a writer to a reader, such as 'a_0_1 -> q_2_3', of all words together"
        raise BNetError("convention='mib'", expected="edges between writers and readers", actual=name, hint=hint)
    return MIB_SEPARATOR.join(str(end) for end in ends)


def from_mib_name(name: str) -> str:
    """The name of an edge of MIB's format.

    >>> from_mib_name("input->a0.h2<v>")
    'x_0 -> v_0_2'
    """
    ends = name.split(MIB_SEPARATOR)
    names = [_translate(end, table, 2) for end, table in zip(ends, (WRITERS, READERS), strict=False)]
    if len(ends) != 2 or None in names:
        raise BNetError("edge of the file", expected="a name such as 'a0.h1->a2.h3<q>'", actual=name)
    return join_names([str(end) for end in names])


def write_mib(
    path: object,
    convention: object,
    edge_names: Iterable[str],
    retained: Iterable[str],
    scores: Mapping[str, float],
    model: GroundModel,
) -> None:
    """Write all edges, with their scores (0 without one) and whether they are in the circuit."""
    check_choice("convention", convention, CONVENTIONS)
    included = set(retained)
    edges = {
        to_mib_name(name): {"score": float(scores.get(name, 0.0)), "in_graph": name in included}
        for name in dict.fromkeys([*edge_names, *included])
    }
    ends = [part.split(MIB_SEPARATOR) for part in edges]
    in_graph = {
        end.split("<")[0] for pair, row in zip(ends, edges.values(), strict=True) if row["in_graph"] for end in pair
    }
    nodes = {end.split("<")[0]: None for pair in ends for end in pair} | {"input": None, "logits": None}
    config = _describe_shape(list(nodes), model)
    table = {name: {"in_graph": name in in_graph or name in ("input", "logits")} for name in _list_nodes(config)}
    with atomic_write(as_path(path)) as target:
        target.write_text(json.dumps({"cfg": config, "nodes": table, "edges": edges}), encoding="utf-8")


def read_json(path: object, *, convention: str = "mib") -> StoredCircuit:
    """Read the edges and scores of a circuit in the format of MIB's circuit track.

    Args:
        path: The path of the file.
        convention: The format: `"mib"`.

    Returns:
        The names of the edges in the circuit, and the score of each edge.

    Raises:
        BNetError: The file is not in this format.

    >>> import json, pathlib, tempfile
    >>> edges = {"input->m0": {"score": 0.5, "in_graph": True}, "m0->logits": {"score": 0.1, "in_graph": False}}
    >>> path = pathlib.Path(tempfile.mkdtemp(), "circuit.json")
    >>> _ = path.write_text(json.dumps({"cfg": {}, "nodes": {}, "edges": edges}))
    >>> read_json(path)
    StoredCircuit(edges=('x_0 -> f_0',), scores={'x_0 -> f_0': 0.5, 'f_0 -> y': 0.1})
    """
    check_choice("convention", convention, CONVENTIONS)
    file = as_path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = {str(name): (float(row["score"]), bool(row["in_graph"])) for name, row in content["edges"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "a file with edges, each with score and in_graph"
        raise BNetError(f"{file}", expected=expected, actual=f"{type(error).__name__}: {error}") from error
    scores = {from_mib_name(name): score for name, (score, _) in rows.items()}
    return StoredCircuit(tuple(from_mib_name(name) for name, (_, is_in) in rows.items() if is_in), scores)


def _translate(
    name: str, table: Sequence[tuple[re.Pattern[str], str, re.Pattern[str], str]], column: int
) -> str | None:
    """The counterpart of the name of a node; None without one."""
    for row in table:
        pattern, template = (row[0], row[1]) if column == 0 else (row[2], row[3])
        if match := pattern.fullmatch(name):
            return match.expand(template)
    return None


def _describe_shape(nodes: Sequence[str], model: GroundModel) -> dict[str, Any]:
    """The entries of `cfg`: the numbers of slices and heads, and the width of a state."""
    heads = [tuple(map(int, match.groups())) for node in nodes if (match := re.fullmatch(r"a(\d+)\.h(\d+)", node))]
    steps = [int(node[1:]) for node in nodes if re.fullmatch(r"m\d+", node)]
    group = model.network.graph.by_name.get("x_0")
    width = 0 if group is None else int(model.network.specs[group.index].shape[-1])
    return {
        "n_layers": 1 + max([layer for layer, _ in heads] + steps, default=-1),
        "n_heads": 1 + max((head for _, head in heads), default=-1),
        "parallel_attn_mlp": False,
        "d_model": width,
    }


def _list_nodes(config: Mapping[str, Any]) -> list[str]:
    """All nodes of a net of this shape, in MIB's order."""
    layers, heads = range(config["n_layers"]), range(config["n_heads"])
    inner = [name for t in layers for name in (*(f"a{t}.h{h}" for h in heads), f"m{t}")]
    return ["input", *inner, "logits"]

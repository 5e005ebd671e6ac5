"""The limits of `ratchet.json`: figures of the size of the package, which may only become smaller.

`--check` of `benchmarks.size` and `benchmarks.walks` compares the figures with their limits. `--write-limits` lowers
the limits to the figures; nothing raises a limit except an edit of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

LIMITS = Path(__file__).with_name("ratchet.json")
HINT = f"Make it smaller, or raise the limit in benchmarks/{LIMITS.name} in the commit that names the reason."


def check_figures(script: str, figures: Mapping[str, int], lower: bool) -> int:
    """Compare figures with the limits of a script, and print those over their limit.

    Args:
        script: The name of the script, under which the file has its limits.
        figures: The figures by their name. A figure without a limit is over it, except with `lower`.
        lower: True lowers each limit to its figure and removes the limits of other figures.

    Returns:
        The exit status: 1 if a figure is over its limit.
    """
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    if lower:
        limits[script] = {name: min(n, limits[script].get(name, n)) for name, n in figures.items()}
        LIMITS.write_text(json.dumps(limits, indent=4) + "\n", encoding="utf-8")
    over = {name: n for name, n in figures.items() if n > limits[script].get(name, -1)}
    for name, n in over.items():
        limit = limits[script].get(name, 0)
        print(f"{script}: {name}: {n:,} is {n - limit:,} over its limit of {limit:,}")
    if over:
        print(HINT)
    return int(bool(over))


def find_circles() -> list[list[str]]:
    """Find the modules of the package that import each other, directly or through other modules.

    Imports for types and inside functions count.

    Returns:
        The modules of each circle.
    """
    # Imported here, so that the counts of lines need only the standard library.
    import grimp
    import networkx as nx

    graph = grimp.build_graph("bnet_transformer", cache_dir=None)
    modules = nx.DiGraph((a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a))
    return [sorted(circle) for circle in nx.strongly_connected_components(modules) if len(circle) > 1]


def count_public_names() -> dict[str, int]:
    """Count the public names of the root of the package and of its two main classes."""
    import bnet_transformer as bt

    names = {"the root": bt.__all__, "`Sentence`": dir(bt.Sentence), "`BNet`": dir(bt.BNet)}
    return {f"public names of {owner}": sum(not n.startswith("_") for n in of) for owner, of in names.items()}

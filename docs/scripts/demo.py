"""The demo: the bnet of a sentence with the chapter's net. Prints what it is made of; writes files to `demo/`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import bnet_transformer as bt
from bnet_transformer.tpm import Categorical

SENTENCE = "the cat sat on the mat"
VOCABULARY = ("the", "cat", "sat", "on", "mat")


def main() -> None:
    """Build, ask, write."""
    folder = Path("demo")
    folder.mkdir(exist_ok=True)
    net = bt.bayesuvius(
        dim=8, slices=2, heads=4, mask="causal", vocabulary=VOCABULARY, observe=Categorical(len(VOCABULARY))
    )
    s = net.sentence(SENTENCE)
    print(f"The bnet of {SENTENCE!r}, read by the chapter's net: {net!r}\n")
    tell_nodes(s)
    tell_arrows(s)
    tell_answers(s)
    written = write(s, folder)
    print("\nWritten:")
    for path, what in written.items():
        print(f"  {path!s:28} {what}")


def tell_nodes(s: bt.Sentence) -> None:
    """The nodes by role and kind."""
    graph = s.graph()
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, node in graph.nodes(data=True):
        learnable = "learnable" if node["learnable"] else ""
        rows.setdefault((node["role"], node["tpm"], f"{node['kind']} {learnable}".strip()), []).append(name)
    print(f"{len(graph)} nodes")
    print(f"  {'role':8}{'TPM':14}{'kind':28}{'count':>5}   nodes")
    for (role, tpm, kind), names in rows.items():
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        print(f"  {role:8}{tpm:14}{kind:28}{len(names):>5}   {shown}")


def tell_arrows(s: bt.Sentence) -> None:
    """The arrows, counted by the roles that they join."""
    graph = s.graph()
    role = graph.nodes(data="role")
    counts = Counter((role[u], role[v]) for u, v in graph.edges)
    print(f"\n{graph.number_of_edges()} arrows")
    for (parent, child), count in counts.items():
        print(f"  {parent + ' -> ' + child:16}{count:>5}")


def tell_answers(s: bt.Sentence) -> None:
    """A few questions, and what the bnet answers."""
    print("\nAsked of the bnet")
    print(f"  parents of x_1_2:         {', '.join(s.parents('x_1_2'))}")
    reads = s.attention(0).mean(0)[2]
    shares = ", ".join(f"{word} {share:.2f}" for word, share in zip(s.words, reads.tolist(), strict=True))
    print(f"  'sat' reads (slice 0):    {shares}")
    print(f"  P(c):                     {told(s.posterior('c'))}")
    print(f"  P(c | y_5 = mat):         {told(s.posterior('c', {'y_5': 'mat'}))}")
    patched = s.do({"x_0_0": s["x_0_1"]})
    shift = (patched["x_2_5"] - s["x_2_5"]).norm(dim=-1).mean().item()
    below = len(s.descendants("x_0_0"))
    print(f"  do(x_0_0 := x_0_1):       {below} of {len(s.ground)} nodes descend from it; x_2_5 moves by {shift:.2f}")


def told(probabilities: object) -> str:
    """Probabilities in one short line."""
    return ", ".join(f"{p:.3f}" for p in probabilities.tolist())  # type: ignore[attr-defined]


def write(s: bt.Sentence, folder: Path) -> dict[Path, str]:
    """Write the graph, the discrete part, the equations and the net."""
    files = {
        folder / "cat.json": "the ground graph as node-link JSON (networkx reads it)",
        folder / "cat.graphml": "the same as GraphML (Gephi, yEd, Cytoscape read it)",
        folder / "cat.bif": "the discrete part, given the words (pgmpy reads it)",
    }
    for path in files:
        s.draw(path)
    for form in ("word", "row"):
        path = folder / f"equations_{form}.tex"
        path.write_text(s.net.equations(form).document(), encoding="utf-8")
        files[path] = f"the structural equations and TPMs, {form} form (LaTeX)"
    s.net.save(folder / "net.safetensors")
    files[folder / "net.safetensors"] = "the net: parameters and declaration, read by bt.load"
    return files


if __name__ == "__main__":
    main()

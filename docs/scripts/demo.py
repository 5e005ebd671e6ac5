"""The demo: the bnet of a sentence in MiniLM, a real model. It prints the parts of the bnet and writes files to
`demo/`."""

from __future__ import annotations

import json
import time
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch

import bnet_transformer as bt

SENTENCE = "The cat sat on the mat"
FRESH = (
    SENTENCE,
    "A dog ran in the park",
    "The bank raised its key rates",
)  # of equal length, so they run in one batch
RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "heads.json"
NUM_ROWS = 8
SLICE, HEAD, FOUR_WORDS = 2, 3, ["cat", "sat", "on", "mat"]  # of the figure with all nodes


def main() -> None:
    """Build the bnet, query it, and write the files."""
    folder = Path("demo")
    folder.mkdir(exist_ok=True)
    start = time.perf_counter()
    print_step(1, "load MiniLM, and build the bnet of a sentence")
    net = bt.from_pretrained("minilm")
    s = net.sentence(SENTENCE)
    print(f"The bnet of {SENTENCE!r} in MiniLM: {net!r}\n")
    print_words(s)
    print_nodes(s)
    print_reads(s)
    print_step(2, "query the bnet, and intervene on it")
    print_answers(s)
    print_heads()
    print_step(3, "fit which heads matter for three sentences (the longest step: under a minute on two cores)")
    print_inclusion(net)
    print_step(4, "draw, and write graphs and equations")
    files = write_files(s, folder)
    print(f"\nDone in {time.perf_counter() - start:.0f} s. Written:")
    for path, subject in files.items():
        print(f"  {path!s:28} {subject}")
    print(f"\nOpen first: {folder / 'cat.html'} in a browser, then {folder / 'cat.png'} and {folder / 'heads.png'}.")
    print("Then: the example in README.md, and docs/getting_started.md")


def print_step(number: int, subject: str) -> None:
    """Print the heading of a step."""
    print(f"\n== step {number} of 4: {subject} ...", flush=True)


def print_words(s: bt.Sentence) -> None:
    """Print the tokens, with their spans in the text."""
    tokens = [
        f"{i}:{token}" + (" (special)" if special else f" {span}")
        for i, (token, special, span) in enumerate(zip(s.words, s.tokens.special, s.tokens.spans, strict=True))
    ]
    print("Words      " + ", ".join(tokens))


def print_nodes(s: bt.Sentence) -> None:
    """Print the number of nodes of each role, and of arrows."""
    counts: Counter[str] = Counter()
    for group in s.ground.template.groups:
        counts[group.role] += prod(s.ground.shapes[group.index])
    print(f"Nodes      {len(s.ground):,}: " + ", ".join(f"{count} {role}" for role, count in counts.items()))
    print(f"Arrows     {s.ground.count_arrows():,}\n")


def print_reads(s: bt.Sentence) -> None:
    """Print the strongest reads of each slice: head, attending word, attended word."""
    print("Strongest reads, without special tokens")
    plain = [i for i, special in enumerate(s.tokens.special) if not special]
    for slice_ in range(6):
        attention = s.attention(slice_)[:, plain][:, :, plain]
        top = attention.flatten().topk(4)
        reads = []
        for weight, flat_index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            head, pair = divmod(flat_index, len(plain) ** 2)
            i, j = (plain[k] for k in divmod(pair, len(plain)))
            reads.append(f"{s.words[i]}_{i} -> {s.words[j]}_{j} {weight:.2f} (head {head})")
        print(f"  slice {slice_}: " + ", ".join(reads))


def print_answers(s: bt.Sentence) -> None:
    """Print some queries and their results."""
    print("Queries")
    print(f"  parents of a_0_3_2:       {', '.join(s.parents('a_0_3_2')[:4])}, ...")
    moved = {
        head: float(
            (s.do({f"a_3_{head}_{i}": torch.zeros(32) for i in range(len(s.words))})["x_6_2"] - s["x_6_2"]).norm()
        )
        for head in range(12)
    }
    strongest = max(moved, key=lambda head: moved[head])
    print(f"  do(head = 0) in slice 3:  head {strongest} moves the last state of 'cat' most, by {moved[strongest]:.2f}")
    net = s.net
    embeddings = {
        text: net.sentence(text)["embedding"] for text in ("A kitten lay on a rug", "The bank raised its rates")
    }
    for text, embedding in embeddings.items():
        print(f"  similarity of embeddings: {torch.cosine_similarity(s['embedding'], embedding, 0):.2f} to {text!r}")


def print_heads() -> None:
    """Print the chapter's other model of heads, on the small net of the package: one head for each sentence."""
    s = bt.from_pretrained("tiny").sentence("the cat sat on a dog ran by the")
    observed = {f"y_{i}": s.words[i + 1] for i in range(2, len(s.words) - 1)}
    prior, posterior = ["(" + ", ".join(f"{p:.3f}" for p in s.posterior("c", e).tolist()) + ")" for e in ({}, observed)]
    print(f"\nThe net 'tiny' draws one head for each sentence: P(c) = {prior}, P(c | the words seen) = {posterior}")


def read_stored_result() -> dict[str, Any]:
    """Return the stored result of the experiment `minilm-inclusion`, which takes half an hour: its rows and summary."""
    entry: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["minilm-inclusion"]
    return entry


def read_stored_table(column: str) -> torch.Tensor:
    """Return a column of the stored result, `[slice, head]`."""
    entry = read_stored_result()
    index = entry["head"].index(column)
    table = torch.zeros(6, 12)
    for row in entry["rows"]:
        table[int(row[1].removeprefix("a_")), int(row[2])] = float(row[index])
    return table


def print_inclusion(net: bt.BNet) -> None:
    """Print which heads matter: the top of the stored table, and a small new one."""
    entry = read_stored_result()
    print("\nWhich heads of MiniLM matter: stored result of `python -m experiments minilm-inclusion`")
    print(f"  {entry['summary']}")
    rows = [entry["head"], *entry["rows"][:NUM_ROWS]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)))
    print(f"  ... the first {NUM_ROWS} of {len(entry['rows'])}: docs/experiments/heads.json has all rows")
    start = time.perf_counter()
    result = bt.inclusion(net, list(FRESH), method="svi", rounds=6, draws=400)
    seconds = time.perf_counter() - start
    print(f"\nComputed now, from {len(FRESH)} sentences, in {seconds:.0f} s: few sentences, so the ranks are uncertain")
    columns = ["slice", "head", "rho", "log_bayes", "error", "importance", "ablation"]
    table = result.to_dataframe()[columns].head(4).to_string(index=False, float_format="{:.2f}".format)
    print("\n".join(f"  {line}" for line in table.splitlines()))


def write_files(s: bt.Sentence, folder: Path) -> dict[Path, str]:
    """Write figures, the graph with its strongest reads, and the equations."""
    files = {}
    figures = {
        "cat.svg": ("the grid of reads: every word in every slice, and the strongest reads", {"theme": "auto"}),
        "cat.png": ("the same as an image", {}),
        "ground.png": (
            f"every node of four words, for head {HEAD} in slice {SLICE}",
            {"detail": "nodes", "slices": SLICE, "heads": HEAD, "words": FOUR_WORDS, "weights": False},
        ),
    }
    for name, (subject, options) in figures.items():
        s.draw(folder / name, **options)
        files[folder / name] = subject
    labels = {"slice": [f"slice {k}" for k in range(6)]}
    options = {"axes": ("slice", "head"), "labels": labels, "value_label": "log Bayes factor (approximate)"}
    title = "Which heads of MiniLM matter, from 150 sentences"
    bt.plot(read_stored_table("log_bayes"), **options, title=title).savefig(folder / "heads.png", dpi=144)
    files[folder / "heads.png"] = "the stored result: the log Bayes factor of each head"
    s.draw(folder / "cat.html", inclusion=read_stored_table("rho"))
    files[folder / "cat.html"] = "the interactive page, for a browser"
    s.net.draw(folder / "folded.png")
    files[folder / "folded.png"] = "the template graph: one box for each node group"
    data = {
        folder / "cat.json": "the ground graph, reads of at least 0.1, as node-link JSON (networkx reads it)",
        folder / "cat.graphml": "the same as GraphML (Gephi, yEd, Cytoscape read it)",
    }
    for path in data:
        s.draw(path, weights=False, min_weight=0.1)
    files |= data
    for form in ("word", "row"):
        path = folder / f"equations_{form}.tex"
        path.write_text(s.net.equations(form).document(), encoding="utf-8")
        files[path] = f"the structural equations and TPMs, {form} form (LaTeX)"
    tiny = bt.from_pretrained("tiny").sentence("the cat sat on the mat")
    tiny.draw(folder / "tiny.bif")
    files[folder / "tiny.bif"] = "the discrete part of 'tiny', given the words (pgmpy reads it)"
    return files


if __name__ == "__main__":
    main()

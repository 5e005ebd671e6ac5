"""Rows of pretrained models: MiniLM as transformers computes it, the same sentences, equal results."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, fresh, interleaved, peak_memory, ratios
from bnet_transformer.pretrained.source import package_folder

SENTENCES = (Path(__file__).parent.parent / "tests" / "sentences.txt").read_text(encoding="utf-8").splitlines()


def minilm_forward() -> list[Figure]:
    """The last states of 32 sentences (padded to the longest) in MiniLM, against `transformers` with SDPA; no
    gradients."""
    theirs, ours = _pair("sdpa", ["x_6"])
    return _told("transformers, sdpa", theirs, ours, 1.05)


def minilm_forward_long() -> list[Figure]:
    """The same for 8 texts of 128 tokens without padding."""
    theirs, ours = _pair("sdpa", ["x_6"], long=True)
    return _told("transformers, sdpa", theirs, ours, 1.05)


def minilm_attentions() -> list[Figure]:
    """The last states and all 72 attention tables of the 32 sentences, against `transformers` in its eager mode."""
    theirs, _ = _pair("eager", ["x_6"], attentions=True)
    net = bt.from_pretrained("minilm")
    module, batch = net.module().eval(), net.batch(SENTENCES[:32])

    def ours() -> object:
        with torch.no_grad():
            return module.readings(batch.x, batch.mask, given=batch.given, want=["x_6"])

    return _told("transformers, eager", theirs, ours, 1.0)


def minilm_load() -> list[Figure]:
    """From the start of loading to the first sentence's last state, and the peak of resident memory, each in a fresh
    process that has imported its library; the file is in the disk cache."""
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for _ in range(9):
        for who, runs in found.items():
            runs.append(fresh(_load, who))
    seconds = {name: [run[0] for run in runs] for name, runs in found.items()}
    memory = {name: [run[1] for run in runs] for name, runs in found.items()}
    return [
        figure("ours", seconds["ours"], "s"),
        figure("transformers' from_pretrained", seconds["theirs"], "s"),
        figure("ratio of times", ratios(seconds["ours"], seconds["theirs"]), "", target=1.1),
        figure("ours, peak memory", memory["ours"], "MB"),
        figure("transformers, peak memory", memory["theirs"], "MB"),
        figure("ratio of peaks", ratios(memory["ours"], memory["theirs"]), "", target=1.1),
    ]


def _load(who: str) -> tuple[float, float]:
    torch.set_num_threads(1)
    folder = package_folder("minilm")
    ids = torch.tensor([[101, 1996, 4937, 2938, 102]])
    if who == "ours":
        import networkx
        import tokenizers

        from bnet_transformer.pretrained import from_pretrained

        assert networkx is not None and tokenizers is not None  # as theirs, imported before the clock starts
        start = time.perf_counter()
        with torch.no_grad():
            from_pretrained(folder).module().eval()(ids)
        return time.perf_counter() - start, peak_memory()
    from transformers import AutoModel, AutoTokenizer

    AutoModel, AutoTokenizer  # noqa: B018  (their modules are imported on first access)
    from transformers.models.bert import modeling_bert

    assert modeling_bert is not None
    start = time.perf_counter()
    AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        AutoModel.from_pretrained(folder).eval()(ids)
    return time.perf_counter() - start, peak_memory()


def _pair(
    attention: str, want: list[str], *, long: bool = False, attentions: bool = False
) -> tuple[Callable[[], object], Callable[[], object]]:
    from transformers import AutoModel

    net = bt.from_pretrained("minilm")
    model = AutoModel.from_pretrained(package_folder("minilm"), attn_implementation=attention).eval()
    module = net.module().eval()
    x: Any
    mask: Any
    if long:
        torch.manual_seed(0)
        x, mask, given = torch.randint(1000, 30000, (8, 128)), None, None
    else:
        batch = net.batch(SENTENCES[:32])
        x, mask, given = batch.x, batch.mask, batch.given
    told = {} if mask is None else {"attention_mask": mask.long()}

    def theirs() -> object:
        with torch.no_grad():
            return model(x, output_attentions=attentions, **told)

    def ours() -> object:
        with torch.no_grad():
            return module(x, mask, given=given, want=want)

    there = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(ours()["x_6"][there], theirs()[0][there], rtol=1e-4, atol=1e-4)  # type: ignore[index]
    return theirs, ours


def _told(name: str, theirs: Callable[[], object], ours: Callable[[], object], target: float) -> list[Figure]:
    spent = interleaved({"ours": ours, "theirs": theirs}, runs=41, warm=5)
    return [
        figure("compiled net", spent["ours"], "s"),
        figure(name, spent["theirs"], "s"),
        figure("ratio", ratios(spent["ours"], spent["theirs"]), "", target=target),
    ]

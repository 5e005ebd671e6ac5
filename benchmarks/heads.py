"""Rows of head inclusion: runs of MiniLM with gates on its heads, compared with `transformers` with a head mask."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Figure, figure, peak_memory, ratios, run_in_process, time_calls
from benchmarks.limits import measure_limit

SENTENCES, SETTINGS, RUNS = 8, 32, 3
MAX_HEADS = 12


def gated_runs() -> list[Figure]:
    """MiniLM (6 slices of 12 heads), 8 sentences, 32 random settings of the gates of each slice, with the other slices
    on: 1,536 runs to the last state. Ours: `GatedRuns.log_prob_table`, the table of log P that the exact method sums
    (sentences of one length at a time; values that the gates do not change are computed once). Theirs: a loop of
    `transformers` forward passes, one for each sentence and setting, with the head mask applied to the input of the
    output projection (transformers 5 has no `head_mask=`); then the same loop with the 32 settings as one batch.
    Distances from the full output agree to 1e-4. The target is at least 4 times the runs of the loop: a ratio of at
    most 1/4."""
    import torch

    model, tokenizer = _load_transformers()
    sentences = read_sentences(SENTENCES)
    gates = (torch.rand(SETTINGS, MAX_HEADS, generator=torch.Generator().manual_seed(0)) < 0.7).double()
    runs = _create_runs(sentences)
    run_gated = lambda: runs.log_prob_table(gates, lambda count: None)  # noqa: E731
    encoded = [tokenizer(text, return_tensors="pt") for text in sentences]
    run_single = lambda: run_looped(model, encoded, gates, 1)  # noqa: E731
    run_batched = lambda: run_looped(model, encoded, gates, SETTINGS)  # noqa: E731
    torch.testing.assert_close(run_gated(), run_single(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run_gated(), run_batched(), rtol=1e-4, atol=1e-4)
    spent = time_calls({"ours": run_gated, "alone": run_single, "together": run_batched}, runs=RUNS, warm=0)
    count = SENTENCES * SETTINGS * len(runs.sites)
    names = {"ours": "ours", "alone": "transformers", "together": "transformers, batched"}
    rows = [
        figure(f"{subject}: runs of a sentence", [count / s for s in spent[key]], "/s")
        for key, subject in names.items()
    ]
    rows.append(figure("time, ours over transformers", ratios(spent["ours"], spent["alone"]), "", 1 / 4))
    rows.append(figure("time, ours over transformers, batched", ratios(spent["ours"], spent["together"]), ""))
    return [*rows, *measure_limit(run_gated, spent["ours"])]


def memory_of_inclusion() -> list[Figure]:
    """The peak resident memory of a fresh process that makes the exact table of MiniLM's last slice (4,096 settings, 4
    sentences), and of one that runs 36 passes of the joint method over 64 sentences, minus that of one that loads the
    net and runs a sentence."""
    base = run_in_process(_measure_peak, "load")
    return [
        figure("net loaded, one run", base, "MB"),
        figure("exact, last slice", run_in_process(_measure_peak, "exact") - base, "MB more"),
        figure("svi, all slices", run_in_process(_measure_peak, "svi") - base, "MB more"),
    ]


def growth_with_heads() -> list[Figure]:
    """`bt.inclusion(method="exact")` of an encoder of two slices, 48 wide, with 2 to 12 heads, 16 sentences of 8 words,
    200 draws: seconds, and the seconds of the runs of the net. Each head doubles the number of settings."""
    rows = []
    for heads in (2, 4, 6, 8, 12):
        runs, full = create_jobs(heads)
        spent = time_calls({"runs": runs, "whole": full}, runs=RUNS, warm=0)
        rows.append(figure(f"{heads} heads: runs of the net", spent["runs"], "s"))
        rows.append(figure(f"{heads} heads: all", spent["whole"], "s"))
        rows += measure_limit(runs, spent["runs"], name=f"{heads} heads: runs of the net")
    return rows


def create_jobs(heads: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the runs of the net for the exact method, and the complete method."""
    import torch

    import bnet_transformer as bt
    from bnet_transformer.attention.gates import gate_settings
    from bnet_transformer.attention.inclusion import create_runs

    net = bt.encoder(dim=48, heads=heads, slices=2, vocabulary=50, positions="sinusoidal", dropout=0.0)
    ids = list(torch.randint(50, (16, 8), generator=torch.Generator().manual_seed(heads)))
    runs = create_runs(net.network, ids)
    return (
        lambda: runs.log_prob_table(gate_settings(heads), lambda count: None),
        lambda: bt.inclusion(net, ids, draws=200, progress=False),
    )


def read_sentences(count: int) -> list[str]:
    """Return the first sentences of the committed file."""
    return (ROOT / "tests" / "sentences.txt").read_text(encoding="utf-8").split("\n")[:count]


def run_looped(model: Any, encoded: list[Any], gates: Any, batch: int) -> Any:
    """Return minus half the squared distance of the last state from that of the full model, `[slice, sentence,
    setting]`, by forward passes with hooks."""
    import torch

    slices = model.encoder.layer
    result = torch.empty(len(slices), len(encoded), len(gates), dtype=torch.float64)
    with torch.no_grad():
        full = [model(**item).last_hidden_state for item in encoded]
        for s, slice_ in enumerate(slices):
            for k, item in enumerate(encoded):
                for start in range(0, len(gates), batch):
                    settings = gates[start : start + batch]
                    mask = settings.float().repeat_interleave(model.config.hidden_size // settings.shape[1], 1)[:, None]
                    hook = slice_.attention.output.dense.register_forward_pre_hook(lambda _, x, m=mask: (x[0] * m,))
                    try:
                        rows = {name: value.expand(len(settings), -1) for name, value in item.items()}
                        difference = model(**rows).last_hidden_state - full[k]
                    finally:
                        hook.remove()
                    result[s, k, start : start + batch] = -0.5 * difference.square().sum((1, 2)).double()
    return result


def _load_transformers() -> tuple[Any, Any]:
    """Return MiniLM of `transformers`, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    from bnet_transformer.pretrained.source import find_package_path

    folder: Path = find_package_path("minilm")
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def _create_runs(sentences: list[str]) -> Any:
    """Return the gated runs of MiniLM on sentences."""
    import bnet_transformer as bt
    from bnet_transformer.attention.inclusion import create_runs

    return create_runs(bt.from_pretrained("minilm").network, sentences)


def _measure_peak(subject: str) -> float:
    """Return the peak memory of a process that runs this code."""
    import torch

    from bnet_transformer.attention.gates import gate_settings, relaxed_gate_posterior

    runs = _create_runs(read_sentences(64 if subject == "svi" else 4))
    if subject == "exact":
        from dataclasses import replace

        replace(runs, sites=runs.sites[-1:]).log_prob_table(gate_settings(MAX_HEADS), lambda count: None)
    elif subject == "svi":
        relaxed_gate_posterior(runs, 1.0, 3, 100, torch.Generator().manual_seed(0), lambda count: None)
    else:
        for part in runs.parts():
            runs.gated_log_probs(part, torch.ones(len(part), len(runs.sites), runs.num_heads))
    gc.collect()
    return peak_memory()

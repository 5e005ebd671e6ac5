"""Rows of growth: how time and memory grow with words, slices, heads, atoms and sentences, as slopes of logarithms.

A slope of 1 is proportional growth, 2 is quadratic. The time at a size is the minimum of its runs. The memory is the
maximum that a run holds in addition to earlier memory. All rows use one thread. A target is the maximum of the theory
plus 0.1 for the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import bnet_transformer as bt
from benchmarks import fits
from benchmarks.harness import Figure, figure, growth_figure, measure_peak, ratios, time_calls
from benchmarks.mixtures import use_one_thread
from bnet_transformer.graph import GroundGraph

Job = Callable[[], object]
TOLERANCE = 0.1  # added to the slope of the theory


def of_the_forward_pass() -> list[Figure]:
    """The forward pass of a concat net (2 slices, 4 heads of 32, 128 wide, 16 sentences of 64 words unless a size
    varies; words of one sentence), no gradients, one thread. Attention is quadratic in words, and each added head adds
    its own maps."""
    with torch.no_grad(), use_one_thread():
        return _fit_net_slopes(_create_forward)


def of_a_training_step() -> list[Figure]:
    """The same net, forward and backward."""
    with use_one_thread():
        return _fit_net_slopes(_create_training)


def of_elimination() -> list[Figure]:
    """A gradient of the exact marginal of a mixture (8 heads, 16 words, d=8, d_k=4, 256 sentences, one thread), and of
    codebooks (4 heads) with a varying number of atoms per role. With Gram matrices, the q and k of atoms are combined
    in pairs, and with v only as numbers: only cheap operations are cubic. 32 heads share the atoms of 4 at no cost."""
    with use_one_thread():
        rows = [
            *_fit_slopes("heads", {k: fits.create_step(heads=k, words=16, sentences=256) for k in (8, 16, 32, 64)}, 1),
            *_fit_slopes("words", {n: fits.create_step(heads=8, words=n, sentences=64) for n in (32, 64, 128, 256)}, 2),
            *_fit_slopes(
                "sentences", {n: fits.create_step(heads=8, words=16, sentences=n) for n in (256, 512, 1024, 2048)}, 1
            ),
            *_fit_slopes("atoms per role", {m: fits.create_step(heads=4, words=16, atoms=m) for m in (4, 8, 16)}, 2),
        ]
        width = {k: fits.create_step(heads=k, words=16, atoms=8) for k in (4, 32)}
        spent = time_calls({str(k): call for k, call in width.items()}, runs=5)
        return [*rows, figure("codebooks, 32 heads over 4", ratios(spent["32"], spent["4"]), "", target=1.5)]


def of_the_ground_graph() -> list[Figure]:
    """All arrow arrays of a sentence's ground graph (128 words, 6 slices, 12 heads, concat), created and kept. Every
    word attends to every word."""
    return [
        *_fit_slopes("words", {n: _create_arrows(words=n) for n in (64, 128, 256, 512)}, 2),
        *_fit_slopes("slices", {t: _create_arrows(slices=t) for t in (4, 8, 16, 32)}, 1),
        *_fit_slopes("heads", {h: _create_arrows(heads=h) for h in (6, 12, 24, 48)}, 1),
    ]


def of_a_sweep() -> list[Figure]:
    """`bt.sweep` over every (slice, word) of a decoder (4 slices, 4 heads, 128 wide, 32 words, one pair of sentences;
    every word differs), and over every (slice, head); one thread. The number of cells grows with words and slices, and
    so does the work of each cell, while words are too few for their square to matter. Each added head adds a cell in
    each slice."""
    with use_one_thread():
        return [
            *_fit_slopes("words", {n: _create_sweep(words=n) for n in (16, 32, 64, 128)}, 2, 3),
            *_fit_slopes("slices", {t: _create_sweep(slices=t) for t in (2, 4, 8, 12)}, 2, 3),
            *_fit_slopes("heads, cells (slice, head)", {h: _create_sweep(heads=h, at="a") for h in (4, 8, 16, 32)}, 1),
            *_fit_slopes("sentences", {s: _create_sweep(sentences=s) for s in (2, 4, 8, 16)}, 1, 3),
        ]


def _fit_slopes(subject: str, jobs: Mapping[int, Job], maximum: float, runs: int = 5) -> list[Figure]:
    """Return the slopes of time and memory over a size; `most` is the slope that the theory allows."""
    sizes = list(jobs)
    spent = time_calls({str(size): job for size, job in jobs.items()}, runs=runs)
    peaks = [measure_peak(job) for job in jobs.values()]
    label = f"{subject} {sizes[0]:,} to {sizes[-1]:,}"
    rows = [
        growth_figure(
            f"{label}: time, theory {maximum:g}", sizes, [min(item) for item in spent.values()], maximum + TOLERANCE
        )
    ]
    return rows + (
        [growth_figure(f"{label}: memory, theory {maximum:g}", sizes, peaks, maximum + TOLERANCE)]
        if min(peaks) > 0
        else []
    )


def _fit_net_slopes(job: Callable[..., Job]) -> list[Figure]:
    """Fit the slopes of a job of the concat net over words, slices, heads and sentences."""
    return [
        *_fit_slopes("words", {n: job(words=n, sentences=1) for n in (256, 512, 1024, 2048)}, 2),
        *_fit_slopes("slices", {t: job(slices=t) for t in (2, 4, 8, 16)}, 1),
        *_fit_slopes("heads", {h: job(heads=h) for h in (4, 8, 16, 32)}, 1),
        *_fit_slopes("sentences", {s: job(sentences=s) for s in (8, 16, 32, 64)}, 1),
    ]


def _create_net(heads: int, slices: int) -> bt.BNet:
    """Return a concat net whose heads are 32 wide, for any number of heads."""
    torch.manual_seed(0)
    return bt.bayesuvius(128, slices=slices, heads=heads, combine="concat", key_dim=32, value_dim=32)


def _create_forward(*, words: int = 64, slices: int = 2, heads: int = 4, sentences: int = 16) -> Job:
    """Return a forward pass of the concat net."""
    module, x = _create_net(heads, slices).module().eval(), torch.randn(sentences, words, 128)
    return lambda: module(x)


def _create_training(**sizes: int) -> Job:
    """Return a forward and backward pass of the concat net."""
    forward: Callable[[], Any] = _create_forward(**sizes)
    return lambda: forward().sum().backward()


def _create_arrows(*, words: int = 128, slices: int = 6, heads: int = 12) -> Job:
    """Return a job that makes all arrow arrays of a ground graph."""
    graph = bt.bayesuvius(24, slices=slices, heads=heads, combine="concat", key_dim=2, value_dim=2).network.graph
    return lambda: list(GroundGraph(graph, {"": words}).arrows())


def _create_sweep(*, words: int = 32, slices: int = 4, heads: int = 4, sentences: int = 1, at: str = "x") -> Job:
    """Return a sweep of a decoder."""
    torch.manual_seed(0)
    net = bt.decoder(128, heads=heads, slices=slices, vocabulary=64, dropout=0.0)
    clean = torch.randint(64, (sentences, words))
    corrupt = (clean + 1) % 64
    metric = {f"y_{words - 1}": (3, 5)}

    def job() -> object:
        pairs = [[net.sentence(row) for row in ids.tolist()] for ids in (clean, corrupt)]
        first, second = pairs if sentences > 1 else [item[0] for item in pairs]
        return bt.sweep(first, second, at=at, over=None if at == "x" else ("slice", "head"), metric=metric)

    return job

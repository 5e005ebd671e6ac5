"""Which heads of MiniLM matter: their inclusion from 200 sentences, compared with gradient importance and ablation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bnet_transformer as bt
from bnet_transformer.attention import Damage, Inclusion, damage
from bnet_transformer.attention.inclusion import MEASURES
from experiments.result import Result

SENTENCES = Path(__file__).resolve().parent.parent / "tests" / "sentences.txt"
LEARNED, EXACT = 150, 8  # numbers of sentences: of all measures; of the exact method
EVERY_SIXTH = tuple(range(0, 72, 6))  # the rows of 72 that the page shows
COLUMNS = ("rho", "log_bayes", "error", "importance", "ablation")


def inclusion() -> Result:
    """Compute the table of all 72 heads."""
    result, seconds = _fit_jointly(LEARNED)
    summary = (
        f"{result.caption}: all slices at once, by variational inference, on the first {LEARNED} of the 200 sentences "
        f"of tests/sentences.txt. `rho` is the share of sentences in which a head is active; `log_bayes` is the log "
        f"Bayes factor for `rho` free against `rho = 0`, an approximation, `error` its Monte Carlo error only; "
        f"importance and ablation are in nats per sentence. The computation, including these two measures, took "
        f"{seconds:.0f} s."
    )
    frame = result.to_dataframe()
    rows = [
        (str(row["rank"]), str(row["slice"]), str(row["head"]), *(f"{row[name]:.3f}" for name in COLUMNS))
        for _, row in frame.iterrows()
    ]
    figures = {"The log Bayes factor of each head": bt.plot(result, show="log_bayes")}
    return Result("minilm inclusion", summary, ("rank", "slice", "head", *COLUMNS), tuple(rows), figures, EVERY_SIXTH)


def agreement() -> Result:
    """Compute rank correlations of the measures, and of the two methods."""
    joint, _ = _fit_jointly(LEARNED)
    small, _ = _fit_jointly(EXACT)
    start = time.perf_counter()
    exact = bt.inclusion(_load_net(), _read_sentences()[:EXACT], sigma=small.sigma, output="x_6", progress=False)
    seconds = time.perf_counter() - start
    summary = (
        f"Spearman's rank correlations over the 72 heads: of the three measures on {LEARNED} sentences, and of the log "
        f"Bayes factors of both methods on the first {EXACT}. The exact method treats each slice separately, with "
        f"4,096 settings of 12 gates and the other slices on ({seconds:.0f} s); svi treats all slices at once."
    )
    pairs = [(a, b) for k, a in enumerate(MEASURES) for b in MEASURES[k + 1 :]]
    table = joint.agreement()
    rows = [(f"{a}, {b} ({LEARNED} sentences, svi)", f"{table.loc[a, b]:.3f}") for a, b in pairs]
    exact_table = exact.agreement()
    rows += [(f"{a}, {b} ({EXACT} sentences, exact)", f"{exact_table.loc[a, b]:.3f}") for a, b in pairs]
    correlation = _correlate_ranks(exact.log_bayes.flatten().tolist(), small.log_bayes.flatten().tolist())
    rows.append((f"log Bayes factor, exact and svi ({EXACT} sentences)", f"{correlation:.3f}"))
    duplicates = ", ".join(f"{exact.slices[s]} {a} and {b}" for s, a, b in exact.duplicates()[:5])
    rows.append(("pairs that replace each other (exact, log odds ratio below -1)", duplicates or "none"))
    return Result("minilm agreement", summary, ("what", "found"), tuple(rows))


def held_out() -> Result:
    """Compute the loss of held-out sentences when the k lowest heads of each measure are ablated."""
    result, _ = _fit_jointly(LEARNED)
    test = _read_sentences()[LEARNED:]
    cost: Damage = damage(result, test, progress=False)
    summary = (
        f"The loss in nats (half the squared distance of the last state from that of the full net, over sigma squared, "
        f"sigma {result.sigma:.3g}), as a mean over the {len(test)} sentences that no measure used, with the k "
        f"heads off that a measure ranks lowest."
    )
    frame = cost.to_dataframe()
    errors = cost.error.T.tolist()
    rows = [
        (str(k), *(f"{value:.3f} ± {error:.3f}" for value, error in zip(frame.loc[k], errors[k], strict=True)))
        for k in frame.index
    ]
    means = [f"{value:.3f}" for value in frame.mean()]
    rows.append(("mean over k", *means))
    figures = {"Held-out loss against the number of heads that are off": bt.plot(cost)}
    return Result("minilm damage", summary, ("heads off", *MEASURES), tuple(rows), figures, (*EVERY_SIXTH, 72, 73))


def roles() -> Result:
    """Compute to which words the heads attend."""
    result: Any = bt.roles(_load_net(), _read_sentences())
    frame = result.to_dataframe()
    summary = (
        "To which words each head attends, from all 200 sentences: `bt.roles`. Most heads attend most to the first "
        "word; the heads of this table do not."
    )
    rows = [tuple(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row) for row in frame.values]
    shown = tuple(k for k, row in enumerate(rows) if float(row[-1]) > 0.5 and row[2] != "first")
    return Result(
        "minilm roles",
        summary,
        tuple(frame.columns),
        tuple(rows),
        {"To which words heads attend": bt.plot(result)},
        shown,
    )


@functools.cache
def _load_net() -> bt.BNet:
    """Return MiniLM, loaded once."""
    return bt.from_pretrained("minilm")


@functools.cache
def _fit_jointly(count: int) -> tuple[Inclusion, float]:
    """Return the joint posterior from the first sentences, and its computing time."""
    start = time.perf_counter()
    result = bt.inclusion(_load_net(), _read_sentences()[:count], method="svi", progress=None)
    return result, time.perf_counter() - start


def _read_sentences() -> list[str]:
    """Return the committed sentences."""
    return SENTENCES.read_text(encoding="utf-8").split("\n")[:200]


def _correlate_ranks(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    import pandas as pd

    return float(pd.Series(a).corr(pd.Series(b), method="spearman"))


EXPERIMENTS: dict[str, Callable[[], Result]] = {
    "minilm-inclusion": inclusion,
    "minilm-agreement": agreement,
    "minilm-damage": held_out,
    "minilm-roles": roles,
}

"""Simulation-based calibration of posteriors (Talts et al. 2018): are the ranks of the true values uniform?

    python -m benchmarks.calibration [--replications 200] [--only "all heads, nuts"]

Writes docs/benchmarks/calibration.md and its figures. `--only` measures the rows whose name contains a text; the other
rows of the page stay as they are. NUTS of all heads is measured only by `--only`.

Each replication draws parameters from the prior and sentences from them, fits from a start that does not know them, and
ranks the true values among the posterior draws (`bt.calibrate`). A posterior is calibrated if no quantity leaves its
simultaneous 95% band.

Both nets have two heads, pi ~ Dirichlet(2, 2), N(0, 1) entries of the learned weights, 20 sentences, words of width 2
and noise sigma 1. The two features of a word are correlated (0.95), so the entries of a row of W_v are correlated in
the posterior, which a mean-field guide cannot represent. "Known attention" has 2 words and known W_q and W_k; "all
heads" has 3 words, and learns pi, W_q, W_k and W_v.
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.inference import Evidence, posterior
from bnet_transformer.learning.calibration import Calibration
from bnet_transformer.learning.fit.objective import Method
from bnet_transformer.tpm import Normal

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "calibration.md"
SENTENCES, DIM = 20, 2
CORRELATION = 0.95  # correlation of a word's two features
SLOW = "all heads, nuts"  # not on the page: some 30 seconds for each replication
HEADS = "known attention, exact P(c given y)"
HEADER = "| posterior | quantity | replications | draws | mean position | coverage of 90% | p | verdict |"


@dataclass(frozen=True)
class Case:
    """A net whose posteriors are checked: the words of a sentence, and the parameters that are learned."""

    words: int
    learn: tuple[str, ...]

    @property
    def net(self) -> bt.BNet:
        """The net; its parameters are the start of each fit, and the values of those that are not learned."""
        return bt.bayesuvius(DIM, heads=2, observe=Normal(1.0), prior=2.0, seed=11).to(torch.float64)

    def draw_words(self, seed: int) -> Tensor:
        """Draw the words of all sentences, `[sentence, word, feature]`."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SENTENCES, self.words, DIM, dtype=torch.float64, generator=generator)
        x[..., 1] = CORRELATION * x[..., 0] + math.sqrt(1 - CORRELATION**2) * x[..., 1]
        return x


CASES = {
    "known attention": Case(2, ("c.logits", "W_v_0.values")),
    "all heads": Case(3, ("c.logits", "W_q_0.values", "W_k_0.values", "W_v_0.values")),
}
METHODS: dict[str, Method] = {
    "nuts": bt.NUTS(chains=1, draws=100, warmup=100),
    "laplace": bt.Laplace(),
    "svi": bt.SVI(draws=200, steps=1000, rate=0.03),
}


def calibrate(case: str, method: str, replications: int) -> Calibration:
    """Calibrate the posteriors of a method for a case."""
    chosen = CASES[case]
    options = {"learn": chosen.learn, "spread": 1.0, "seed": 1}
    return bt.calibrate(chosen.net, METHODS[method], x=chosen.draw_words, replications=replications, **options)


def calibrate_heads(replications: int, draws: int = 19) -> Calibration:
    """Calibrate the exact posterior of the head of each sentence, with known parameters: `SENTENCES` ranks a draw."""
    start, case = time.perf_counter(), CASES["known attention"]
    ranks: list[Tensor] = []
    for seed in range(-(-replications // SENTENCES)):
        torch.manual_seed(seed)
        pi = torch.distributions.Dirichlet(torch.full((2,), 2.0, dtype=torch.float64)).sample()
        W_v = torch.randn(2, DIM, DIM, dtype=torch.float64)
        net, x = case.net.replace({"c.logits": pi.log(), "W_v_0.values": W_v}), case.draw_words(seed)
        sample = net.pyro(parameters="own")(x)
        c, y = sample["c"].reshape(-1), sample["y"].reshape(x.shape)
        probs = posterior(net.module(), "c", {"y": Evidence(y)}, x)
        samples = torch.multinomial(probs, draws, replacement=True)
        below, ties = (samples < c[:, None]).sum(1), (samples == c[:, None]).sum(1)
        ranks.append(below + (torch.rand(len(c)) * (ties + 1)).floor().long())
    values = torch.cat(ranks)[:replications]
    seconds = time.perf_counter() - start
    counts = torch.full((replications,), draws)
    return Calibration("exact", {"c": values}, {"c": counts}, replications, seconds=seconds)


def format_rows(name: str, result: Calibration) -> list[str]:
    """Format one row of the page for each quantity."""
    rows = []
    for quantity, row in result.to_dataframe().iterrows():
        coverage = f"{row['coverage of 90%']:.1%} ± {row['standard error']:.1%}"
        verdict = row["verdict"] if row["verdict"] == "calibrated" else f"**{row['verdict']}**"
        cells = [name, quantity, row["replications"], f"{row['draws']:.0f}", f"{row['mean position']:.2f}", coverage]
        rows.append("| " + " | ".join(map(str, [*cells, f"{row['p']:.2g}", verdict])) + " |")
    return rows


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replications", type=int, default=200)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [HEADS, *(f"{case}, {method}" for case in CASES for method in METHODS)]
    parts = read_page(names)
    for name in names:
        if arguments.only not in name or (not arguments.only and name == SLOW):
            continue
        if name == HEADS:
            result = calibrate_heads(10 * arguments.replications)
        else:
            case, method = name.split(", ")
            result = calibrate(case, method, arguments.replications)
        seconds = result.seconds / max(1, result.replications)
        note = f"- {name}: measured on {datetime.date.today()}, {seconds:.3g} seconds for each replication. "
        path = PAGE.with_name(f"calibration_{re.sub('[^a-z]+', '_', name.lower()).strip('_')}.png")
        bt.plot(result, title=name).savefig(path)
        figure = f"![ECDF differences of {name}, with simultaneous bands]({path.name})"
        parts[name] = [*format_rows(name, result), note + ". ".join(result.notes), figure]
        print("\n".join(parts[name]), flush=True)
        write_page([parts[name] for name in names if name in parts])


def read_page(names: list[str]) -> dict[str, list[str]]:
    """Read the rows, the note and the figure of each name on the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    marks = {name: (f"| {name} |", f"- {name}:", f"![ECDF differences of {name},") for name in names}
    parts = {name: [line for line in lines if line.startswith(mark)] for name, mark in marks.items()}
    return {name: part for name, part in parts.items() if part}


def write_page(parts: list[list[str]]) -> None:
    """Write the page from the rows, the note and the figure of each name."""
    text = (__doc__ or "").split("\n\n", 2)[2]
    text = text[text.index("Each replication") :]
    head = "# Calibration of posteriors\n\nMeasured by `python -m benchmarks.calibration` on one thread, with torch "
    rows, notes, figures = (
        [line for part in parts for line in part if line.startswith(start)] for start in ("|", "-", "!")
    )
    table = "\n".join([HEADER, "|" + "---|" * 8, *rows])
    page = [f"{head}{torch.__version__}.", text.rstrip(), table, "\n".join(notes), *figures]
    PAGE.write_text("\n\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

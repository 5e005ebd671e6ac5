"""Recovery of planted heads: does `bt.fit(net, data, method="em")` find what a fit started at the truth finds?

    python -m benchmarks.head_recovery [--level small] [--worlds 60] [--first 5000] [--processes 1] [--json FILE]
    python -m benchmarks.head_recovery --noise [--only "word 0.3"]
    python -m benchmarks.head_recovery --page

Each world that is measured is appended to a file of results (one JSON object a line), and worlds in the file are not
measured again, so a run can be resumed and levels can be run at different times. Each call ends by writing
docs/benchmarks/head_recovery.md from the file; `--page` only writes it. Each process computes on one thread.

A world is a net with heads drawn at random, and sentences sampled from it. The entries of x are N(0, 1), those of W_q,
W_k and W_v are Normal with the scales of the level, y = attention of the head c + sigma noise, and sigma is known. The
default fit starts at random (`bt.fit(net, data, method="em", spread=1.0, seed=world)`); the oracle starts at the
planted parameters (one restart, all steps on all sentences, the same moves of heads). A world is a success if the log
posterior density of the default fit is at least that of the oracle less 0.5 nats, and it finds at least as many heads.
Heads are matched by the Hungarian method on cos A + cos OV, where A = W_q^T W_k and OV = W_v; a head is found if
cos A > 0.8 and cos OV > 0.9. The target of a level is 57 of 60 worlds. The intervals are those of Clopper and Pearson
(95%). The worlds, from seed 5000 on, were not used to choose any setting.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from scipy.stats import beta
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from torch.nn import functional

import bnet_transformer as bt
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.learning.fit.em import SecondOrderOptimizer
from bnet_transformer.learning.fit.heads import match_heads
from bnet_transformer.tpm import Normal

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "head_recovery.md"
RESULTS = PAGE.with_suffix(".jsonl")
FIRST, WORLDS, TARGET = 5000, 60, 57
SPREAD = 1.0  # standard deviation of the Normal prior on the weights
TOLERANCE = 0.5  # nats below the oracle that are a success
MIN_COS_A, MIN_COS_OV = 0.8, 0.9  # of a head that is found
Record = dict[str, Any]


@dataclass(frozen=True)
class Level:
    """The worlds of one difficulty: sizes, noise, the scales of W_q, W_k, W_v, and the proportions of the heads."""

    dim: int
    key: int
    sentences: int
    words: int
    sigma: float
    scales: tuple[float, float, float]
    pi: tuple[float, ...]
    correlation: float = 0.0  # of the first two features of a word

    def create_mixture(self, seed: int) -> bt.BNet:
        """Create a net to be fitted, with random weights."""
        heads, readout = len(self.pi), Normal(self.sigma)
        return bt.bayesuvius(self.dim, heads=heads, key_dim=self.key, observe=readout, seed=seed).to(torch.float64)

    def describe(self) -> str:
        """Describe the level in words."""
        scales, pi = (", ".join(f"{value:g}" for value in values) for values in (self.scales, self.pi))
        text = f"{self.dim} wide, keys {self.key} wide, {len(self.pi)} heads with pi = ({pi}), {self.sentences} "
        text += f"sentences of {self.words} words, sigma {self.sigma:g}, scales of W_q, W_k, W_v ({scales})"
        return text + (f", correlation of the features {self.correlation:g}" if self.correlation else "")


LEVELS = {
    "small": Level(2, 2, 300, 6, 0.7, (1.2, 1.2, 1.2), (0.5, 0.3, 0.2), correlation=0.9),
    "middle": Level(4, 4, 500, 6, 0.7, (0.7, 0.7, 0.5), (0.4, 0.3, 0.2, 0.1)),
    "many": Level(4, 4, 1000, 6, 0.5, (0.8, 0.8, 0.5), (0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06, 0.04)),
    "wide": Level(8, 4, 1000, 8, 1.0, (0.5, 0.5, 0.354), (0.4, 0.3, 0.2, 0.1)),
}


@dataclass(frozen=True)
class World:
    """A planted net, and sentences that were sampled from it."""

    level: Level
    seed: int
    planted: bt.BNet
    x: Tensor  # [sentence, word, feature]
    y: Tensor  # [sentence, word, feature]

    @classmethod
    def create(cls, level: Level, seed: int) -> World:
        """Draw a world."""
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        heads, pi = len(level.pi), torch.tensor(level.pi, dtype=torch.float64)
        rows = {"q": level.key, "k": level.key, "v": level.dim}
        weights = {r: s * draw(heads, rows[r], level.dim) for r, s in zip("qkv", level.scales, strict=True)}
        x = draw(level.sentences, level.words, level.dim)
        if level.correlation:
            x[..., 1] = level.correlation * x[..., 0] + math.sqrt(1 - level.correlation**2) * x[..., 1]
        c = torch.multinomial(pi, level.sentences, replacement=True, generator=generator)
        q, k, v = (torch.einsum("soi,sni->sno", weights[r][c], x) for r in "qkv")
        mean = (q @ k.mT).softmax(-1) @ v
        y = mean + level.sigma * draw(*mean.shape)
        parameters = {f"W_{r}_0.values": weights[r] for r in "qkv"} | {"c.logits": pi.log()}
        return cls(level, seed, level.create_mixture(seed).replace(parameters), x, y)

    def log_posterior(self, net: bt.BNet) -> float:
        """Compute the log posterior density up to a constant: the log evidence plus the Normal prior."""
        with torch.no_grad():
            density = log_evidence(net.module(), {"y": Evidence(self.y)}, self.x).sum()
        squares = sum(net.parameters[f"W_{r}_0.values"].square().sum() for r in "qkv")
        return float(density - squares / (2 * SPREAD**2))

    def count_recovered(self, net: bt.BNet) -> int:
        """Count the planted heads that the net contains."""
        (A, OV), (a, ov) = get_heads(self.planted), get_heads(net)
        cos_A, cos_OV = compute_cosines(A, a), compute_cosines(OV, ov)
        pairs = list(enumerate(match_heads(cos_A + cos_OV)))
        return sum(bool(cos_A[i, j] > MIN_COS_A and cos_OV[i, j] > MIN_COS_OV) for i, j in pairs)


def get_heads(net: bt.BNet) -> tuple[Tensor, Tensor]:
    """Return A = W_q^T W_k and OV = W_v of all heads, both `[head, dim * dim]`."""
    q, k, v = (net.parameters[f"W_{r}_0.values"] for r in "qkv")
    return (q.mT @ k).flatten(1), v.flatten(1)


def compute_cosines(a: Tensor, b: Tensor) -> Tensor:
    """Compute the cosine of each row of `a` and each row of `b`, `[row of a, row of b]`."""
    return functional.cosine_similarity(a[:, None], b[None], dim=-1)


@contextmanager
def skip_sample_steps() -> Iterator[None]:
    """Let second-order fits take all their steps on all sentences, so that a start at the truth stays near it."""
    with mock.patch.object(SecondOrderOptimizer, "draw_sample", lambda optimizer, *labels: None):
        yield


def fit_from_truth(world: World) -> bt.Fit[bt.BNet]:
    """Fit from the planted parameters."""
    data, method = (world.x, world.y), bt.EM(restarts=1)
    with skip_sample_steps():
        return bt.fit(world.planted, data, method=method, spread=SPREAD, seed=world.seed, progress=False)


def measure_world(name: str, seed: int) -> Record:
    """Fit one world of a level as `bt.fit` starts, and from the truth."""
    torch.set_num_threads(1)
    world = World.create(LEVELS[name], seed)
    net, data = world.level.create_mixture(seed), (world.x, world.y)
    start = time.process_time()
    f = bt.fit(net, data, method="em", spread=SPREAD, seed=seed, progress=False)
    spent = time.process_time() - start
    oracle = fit_from_truth(world)
    gap = world.log_posterior(oracle.net) - world.log_posterior(f.net)
    recovered, oracle_recovered = world.count_recovered(f.net), world.count_recovered(oracle.net)
    return {
        "level": name,
        "world": seed,
        "success": gap <= TOLERANCE and recovered >= oracle_recovered,
        "gap": round(gap, 4),
        "found": recovered,
        "oracle_found": oracle_recovered,
        "planted": len(world.level.pi),
        "restarts": len({restart for _, restart, _ in f.measured}),
        "seconds": round(spent, 2),
        "converged": f.converged,
        "oracle_converged": oracle.converged,
        "notes": list(f.notes),
        "date": str(datetime.date.today()),
    }


# The second table: one world for each row, at rising noise, compared by ARI on test sentences.
DIM, KEY, WORDS, TRAIN, TEST = 8, 4, 8, 500, 1000
PI = (0.4, 0.3, 0.2, 0.1)
ROW_SPREAD = 0.5  # close to that of the planted weights
ROWS: dict[str, tuple[str, float, float | None, float | None]] = {
    "sentence 1": ("sentence", 1.0, 0.02, 0.005),
    "sentence 2": ("sentence", 2.0, 0.02, 0.005),
    "sentence 3": ("sentence", 3.0, 0.03, None),
    "word 0.1": ("word", 0.1, 0.02, 0.005),
    "word 0.3": ("word", 0.3, 0.02, 0.005),
    "word 0.5": ("word", 0.5, 0.02, 0.005),
    "word 1": ("word", 1.0, None, None),
}
OFFERED, CODEBOOK = "8 offered, 4 exist", "codebook"


def create_noisy(per: str, sigma: float, heads: int = len(PI), seed: int = 0) -> bt.BNet:
    """Create a net to be fitted, with random weights."""
    return bt.bayesuvius(DIM, heads=heads, key_dim=KEY, per=per, observe=Normal(sigma), seed=seed).to(torch.float64)


def plant_noisy(per: str, sigma: float, seed: int = 0) -> bt.BNet:
    """Create the net that makes the data."""
    generator = torch.Generator().manual_seed(seed)
    scales = {"q": math.sqrt(2 / DIM), "k": math.sqrt(2 / DIM), "v": 1 / math.sqrt(DIM)}
    key, selector = ("value", "c_0") if per == "word" else ("values", "c")
    parameters = {f"{selector}.logits": torch.tensor(PI, dtype=torch.float64).log()}
    for role, scale in scales.items():
        shape = (len(PI), DIM if role == "v" else KEY, DIM)
        parameters[f"W_{role}_0.{key}"] = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return create_noisy(per, sigma).replace(parameters)


def sample_sentences(net: bt.BNet, selector: str, sentences: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sentences x, observations y, and the sampled heads."""
    torch.manual_seed(seed)
    x = torch.randn(sentences, WORDS, DIM, dtype=torch.float64)
    sample = net.pyro(parameters="own")(x)
    return x, sample["y"].reshape(x.shape), sample[selector].reshape(sentences, -1).squeeze(-1)


def evaluate(net: bt.BNet, x: Tensor, y: Tensor, c: Tensor, selector: str) -> tuple[float, float]:
    """Return the ARI and the NLL per dim of a net on test sentences."""
    module, observed = net.module(), {"y": Evidence(y)}
    with torch.no_grad():
        nll = -float(log_evidence(module, observed, x).sum()) / y.numel()
        guess = posterior(module, selector, observed, x).argmax(-1)
    return adjusted_rand_score(c.flatten(), guess.flatten()), nll


def measure_noise(name: str) -> Record:
    """Fit one world at one level of noise, as `bt.fit` starts, with sigma and the prior known."""
    torch.set_num_threads(1)
    per, sigma, ari_gap, nll_gap = ROWS[name]
    selector = "c_0" if per == "word" else "c"
    true = plant_noisy(per, sigma)
    x, y, _ = sample_sentences(true, selector, TRAIN, seed=1)
    test = sample_sentences(true, selector, TEST, seed=2)
    start = time.process_time()
    f = bt.fit(create_noisy(per, sigma), (x, y), method="em", spread=ROW_SPREAD, progress=False)
    spent = time.process_time() - start
    ari, nll = evaluate(f.net, *test, selector)
    oracle_ari, oracle_nll = evaluate(true, *test, selector)
    target, is_reached = "", None
    if ari_gap is not None:
        target, is_reached = f"ARI ≥ {oracle_ari - ari_gap:.3f}", ari >= oracle_ari - ari_gap
        if nll_gap is not None:
            target += f", NLL ≤ {oracle_nll + nll_gap:.4f}"
            is_reached = is_reached and nll <= oracle_nll + nll_gap
    actual = f"ARI {ari:.3f}, NLL {nll:.4f}"
    of = f"ARI {oracle_ari:.3f}, NLL {oracle_nll:.4f}"
    return create_row(name, of, actual, target, is_reached, spent)


def create_row(name: str, of: str, actual: str, target: str, is_reached: bool | None, spent: float) -> Record:
    """Create the record of a row of the second table."""
    row = {"row": name, "of": of, "actual": actual, "target": target, "reached": is_reached, "seconds": round(spent, 1)}
    return row | {"date": str(datetime.date.today())}


def measure_offered() -> Record:
    """Fit eight heads to data of four heads."""
    torch.set_num_threads(1)
    true = plant_noisy("sentence", 1.0)
    x, y, _ = sample_sentences(true, "c", TRAIN, seed=1)
    test = sample_sentences(true, "c", TEST, seed=2)
    start = time.process_time()
    net = create_noisy("sentence", 1.0, heads=8)
    f = bt.fit(net, (x, y), method="em", spread=ROW_SPREAD, progress=False)
    spent = time.process_time() - start
    ari, nll = evaluate(f.net, *test, "c")
    oracle_ari, oracle_nll = evaluate(true, *test, "c")
    shares = ", ".join(f"{p:.3f}" for p in sorted(f.pi.tolist(), reverse=True))
    text = f"ARI {ari:.3f}, NLL {nll:.4f}; {f.heads.live} live, {f.heads.effective:.2f} in effect ({shares})"
    return create_row(OFFERED, f"ARI {oracle_ari:.3f}, NLL {oracle_nll:.4f}", text, "", None, spent)


def create_codebook(atoms: int, seed: int, sigma: float) -> bt.BNet:
    """Create a net whose heads draw from atoms by planted rows, Dirichlet(0.3)."""
    net = bt.bayesuvius(DIM, heads=len(PI), atoms=atoms, key_dim=KEY, observe=Normal(sigma), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    parameters = {"c.logits": torch.tensor(PI).log()}
    torch.manual_seed(seed)
    rows = torch.distributions.Gamma(torch.full((3, len(PI), atoms), 0.3), torch.ones(()))
    sampled = rows.sample().clamp(min=1e-12)
    for k, role in enumerate("qkv"):
        parameters[f"W_{role}_0.logits"] = (sampled[k] / sampled[k].sum(-1, keepdim=True)).log()
        scale = 1 / math.sqrt(DIM) if role == "v" else math.sqrt(2 / DIM)
        shape = (atoms, DIM if role == "v" else KEY, DIM)
        parameters[f"W_{role}_0.atoms"] = scale * torch.randn(shape, generator=generator)
    return net.replace(parameters)


def total_variation(true: bt.BNet, pi: Tensor, theta: Sequence[Tensor]) -> float:
    """Return the pi-weighted total variation between planted and fitted rows, with matched heads: the mean over the
    roles."""
    weights = true.parameters["c.logits"].softmax(-1)
    planted_rows = [true.parameters[f"W_{role}_0.logits"].softmax(-1) for role in "qkv"]
    pairs = zip(planted_rows, theta, strict=True)
    distances = torch.stack([(a[:, None] - b).abs().sum(-1) / 2 for a, b in pairs]).mean(0)
    match = torch.tensor(match_heads(-distances - (weights[:, None] - pi).abs()))
    return float((weights * distances[torch.arange(len(match)), match]).sum())


def fit_observed_atoms(
    states: Sequence[Tensor], atoms: int, restarts: int = 20, steps: int = 500
) -> tuple[Tensor, list[Tensor]]:
    """Fit by EM with observed atoms in each sentence, so that only its head is latent: the lower bound."""
    observed = [functional.one_hot(s, atoms).double() for s in states]
    best: tuple[float, Tensor, list[Tensor]] | None = None
    for r in range(restarts):
        generator = torch.Generator().manual_seed(r)
        pi = torch.full((len(PI),), 1 / len(PI), dtype=torch.float64)
        theta = [
            torch.rand(len(PI), atoms, generator=generator, dtype=torch.float64).log_softmax(-1).exp() for _ in observed
        ]
        for _ in range(steps):
            joint = pi.log() + sum(s @ t.log().mT for s, t in zip(observed, theta, strict=True))
            responsibilities = joint.softmax(-1)
            pi = responsibilities.mean(0)
            theta = [(c := responsibilities.mT @ s + 1e-9) / c.sum(-1, keepdim=True) for s in observed]
        score = float(joint.logsumexp(-1).sum())
        if best is None or score > best[0]:
            best = score, pi, theta
    assert best is not None
    return best[1], best[2]


def measure_codebook(sentences: int = 20_000, atoms: int = 6, sigma: float = 1.0) -> Record:
    """Fit planted rows of theta with known atoms, by EM on the exact marginal."""
    torch.set_num_threads(1)
    true = create_codebook(atoms, seed=0, sigma=sigma)
    torch.manual_seed(1)
    x = torch.randn(sentences, WORDS, DIM)
    sample = true.pyro(parameters="own")(x)
    y = sample["y"].reshape(x.shape)
    tables = ["c.logits", *(f"W_{role}_0.logits" for role in "qkv")]
    fresh = bt.bayesuvius(DIM, heads=len(PI), atoms=atoms, key_dim=KEY, observe=Normal(sigma), seed=5)
    net = true.replace({name: fresh.parameters[name] for name in tables})
    start = time.process_time()
    f = bt.fit(net, (x, y), method="em", learn=tables, progress=False)
    spent = time.process_time() - start
    states = [sample[f"W_{role}_0"].reshape(-1).long() for role in "qkv"]
    lower_bound = total_variation(true, *fit_observed_atoms(states, atoms))
    distance = total_variation(true, f.pi, [f.theta[f"W_{role}_0"] for role in "qkv"])
    of, text = f"{lower_bound:.4f} with observed atoms", f"{distance:.4f}"
    return create_row(f"{CODEBOOK}: TV of theta, pi-weighted", of, text, "TV ≤ 0.05", distance <= 0.05, spent)


def read_results(path: Path) -> list[Record]:
    """Read all results of a file; none if it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append_result(path: Path, record: Record) -> None:
    """Append a result to the file, and print it."""
    line = json.dumps(record, ensure_ascii=False)
    print(line, flush=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def measure_level(name: str, seeds: Iterable[int], processes: int, report: Callable[[Record], None]) -> None:
    """Measure worlds of a level, each reported when it and all before it are done."""
    measure = partial(measure_world, name)
    if processes == 1:
        for seed in seeds:
            report(measure(seed))
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for record in pool.map(measure, seeds):
            report(record)


def clopper_pearson(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a binomial probability (Clopper and Pearson 1934)."""
    tail, failures = (1 - level) / 2, trials - successes
    low = float(beta.ppf(tail, successes, failures + 1)) if successes else 0.0
    high = float(beta.ppf(1 - tail, successes + 1, failures)) if failures else 1.0
    return low, high


def format_level(name: str, records: Sequence[Record]) -> str:
    """Format the row of a level."""
    count, successes = len(records), sum(record["success"] for record in records)
    low, high = clopper_pearson(successes, count)
    planted = sum(record["planted"] for record in records)
    seconds = [record["seconds"] for record in records if record["seconds"] is not None]
    verdict = f"incomplete ({count} of {WORLDS} worlds)"
    if count - successes > WORLDS - TARGET:
        verdict = "**not met**"
    elif successes >= TARGET:
        verdict = "met"
    keys = ("found", "oracle_found")
    recovered, oracle_recovered = (sum(record[key] for record in records) for key in keys)
    complete, oracle_complete = (sum(record[key] == record["planted"] for record in records) for key in keys)
    cells = [
        name,
        f"{successes} of {count}",
        f"{low:.1%} to {high:.1%}",
        f"{recovered} of {planted}",
        f"{oracle_recovered} of {planted}",
        f"{complete}, {oracle_complete}",
        str(max(record["restarts"] for record in records)),
        f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s ({len(seconds)} worlds)" if seconds else "",
        f"{statistics.mean(bool(record['converged']) for record in records):.0%}",
        verdict,
    ]
    return "| " + " | ".join(cells) + " |"


def format_page(results: Sequence[Record]) -> str:
    """Format the page of all stored results."""
    worlds, rows = ([r for r in results if key in r] for key in ("level", "row"))
    by_level = {name: [r for r in worlds if r["level"] == name] for name in LEVELS}
    text = __doc__ or ""
    machine = f"{platform.machine()}, torch {torch.__version__}, one thread for each process"
    dates = sorted({r["date"] for r in results})
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "(nothing measured)"
    parts = [
        "# Recovery of planted heads",
        f"Measured on {when}, {machine}, by `python -m benchmarks.head_recovery`.",
        text[text.index("A world is") :].rstrip(),
        "\n".join(f"- **{name}**: {level.describe()}" for name, level in LEVELS.items()),
    ]
    head = "| level | success | 95% interval | heads found | by the oracle | worlds with all heads: fit, oracle | "
    lines = [head + "restarts | median, greatest time | converged | at least 57 of 60 |", "|" + "---|" * 10]
    lines += [format_level(name, records) for name, records in by_level.items() if records]
    parts.append("\n".join(lines))
    if missing := [f"{name} ({len(r)} of {WORLDS} worlds)" for name, r in by_level.items() if len(r) < WORLDS]:
        parts.append(f"Not complete: {', '.join(missing)}.")
    failures = [
        f"- {r['level']} {r['world']}: {r['gap']:.2f} nats below the oracle, {r['found']} heads found, "
        f"{r['oracle_found']} by the oracle"
        for r in worlds
        if not r["success"]
    ]
    if worlds:
        parts.append("## Failing worlds")
        parts.append("\n".join(failures) if failures else "None.")
        above = sum(r["gap"] < -TOLERANCE for r in worlds)
        parts.append(f"The default fit is more than {TOLERANCE:g} nats above the oracle in {above} worlds.")
    if rows:
        parts.append("## Noise, surplus heads, codebooks")
        parts.append(
            f"One world for each row: {DIM} wide, keys {KEY} wide, {WORDS} words, 4 heads with pi = (0.4, 0.3, 0.2, "
            f"0.1), {TRAIN:,} training and {TEST:,} test sentences, entries of W_q and W_k with standard deviation "
            f'sqrt(2/{DIM}), of W_v 1/sqrt({DIM}); `bt.fit(net, data, method="em", spread={ROW_SPREAD:g})`, which '
            "knows sigma. ARI and NLL (nats per dim) of the test sentences, beside those of the true parameters. The "
            "codebook has 6 known atoms for each role and 20,000 sentences, and only its tables are learned."
        )
        lines = ["| row | truth | fit | target | time | |", "|---|---|---|---|---|---|"]
        verdicts = {True: "met", False: "**not met**", None: ""}
        for r in rows:
            cells = [r["row"], r["of"], r["actual"], r["target"], f"{r['seconds']:.0f} s", verdicts[r["reached"]]]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Parse the arguments, measure what is not stored yet, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", choices=[*LEVELS], action="append", help="default: all levels")
    parser.add_argument("--worlds", type=int, default=WORLDS)
    parser.add_argument("--first", type=int, default=FIRST, help="the seed of the first world")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--noise", action="store_true", help="measure the rows of the second table instead")
    parser.add_argument("--only", default="", help="only rows of the second table whose name contains this text")
    parser.add_argument("--page", action="store_true", help="write the page, without measuring")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, report = read_results(args.json), partial(append_result, args.json)
    if args.noise:
        rows: dict[str, Callable[[], Record]] = {name: partial(measure_noise, name) for name in ROWS}
        rows |= {OFFERED: measure_offered, CODEBOOK: measure_codebook}
        known = [r["row"] for r in results if "row" in r]
        for name, measure in rows.items():
            if args.only in name and not any(row.startswith(name) for row in known):
                report(measure())
    elif not args.page:
        known_worlds = {(r["level"], r["world"]) for r in results if "level" in r}
        for level in args.level or LEVELS:
            seeds = range(args.first, args.first + args.worlds)
            measure_level(level, [s for s in seeds if (level, s) not in known_worlds], args.processes, report)
    if args.json == RESULTS:
        PAGE.write_text(format_page(read_results(args.json)), encoding="utf-8")


if __name__ == "__main__":
    main()

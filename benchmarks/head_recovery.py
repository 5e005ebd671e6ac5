"""Recovery of planted heads: each row of the table next to its oracle, which knows the true parameters.

    python -m benchmarks.head_recovery [--restarts 16] [--steps 400] [--only "word 0.3"]

Writes docs/benchmarks/head_recovery.md. Data: d=8, d_k=4, 8 words, 4 heads, pi=(.4, .3, .2, .1), x ~ N(0, I), entries
of W_q and W_k with standard deviation sqrt(2/d), of W_v 1/sqrt(d), y = attention + sigma noise; 2000 training
sentences, 1000 test sentences. The fits of the first table know the true sigma, and have a Normal(0, 0.5) prior on
every weight, close to the spread of the planted weights: the prior is given, not learned. "Restarts" are those that
remain after pruning.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from torch.nn import functional

import bnet_transformer as bt
from bnet_transformer.learning import checkpoint
from bnet_transformer.learning.fit.comparison import match_heads
from bnet_transformer.tpm import Normal

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "head_recovery.md"
DIM, KEY, WORDS, HEADS, LEARN, JUDGE = 8, 4, 8, 4, 2000, 1000
RESTARTS, STEPS = 16, 400
SPREAD = 0.5  # standard deviation of the Normal prior on the weights, close to that of the planted weights
PI = torch.tensor([0.4, 0.3, 0.2, 0.1])
ROWS: list[tuple[str, float, float | None, float | None]] = [
    ("sentence", 1.0, 0.02, 0.005),
    ("sentence", 2.0, 0.02, 0.005),
    ("sentence", 3.0, 0.03, None),
    ("word", 0.1, 0.02, 0.005),
    ("word", 0.3, 0.02, 0.005),
    ("word", 0.5, 0.02, 0.005),
    ("word", 1.0, None, None),
]


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    cells: tuple[str, ...]
    is_reached: bool | None

    def __str__(self) -> str:
        return "| " + " | ".join((*self.cells, {True: "met", False: "**not met**", None: ""}[self.is_reached])) + " |"


def create_planted(per: str, sigma: float, heads: int = HEADS, seed: int = 0) -> bt.BNet:
    """Return the net that makes the data."""
    generator = torch.Generator().manual_seed(seed)
    net = create_mixture(per, sigma, heads)
    spread = {"q": math.sqrt(2 / DIM), "k": math.sqrt(2 / DIM), "v": 1 / math.sqrt(DIM)}
    key = "value" if per == "word" else "values"
    parameters = {"c_0.logits" if per == "word" else "c.logits": PI.log()}
    for role, scale in spread.items():
        shape = (heads, DIM if role == "v" else KEY, DIM)
        parameters[f"W_{role}_0.{key}"] = scale * torch.randn(shape, generator=generator)
    return net.replace(parameters)


def create_mixture(per: str, sigma: float, heads: int, seed: int = 0) -> bt.BNet:
    """Return a net to be fitted, with random weights."""
    return bt.bayesuvius(DIM, heads=heads, key_dim=KEY, per=per, observe=Normal(sigma), seed=seed)


def sample_sentences(net: bt.BNet, selector: str, sentences: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sentences x, observations y, and the sampled heads."""
    torch.manual_seed(seed)
    x = torch.randn(sentences, WORDS, DIM)
    sample = net.pyro(parameters="own")(x)
    return x, sample["y"].reshape(sentences, WORDS, DIM), sample[selector].reshape(sentences, -1).squeeze(-1)


def evaluate_parameters(net: bt.BNet, x: Tensor, y: Tensor, c: Tensor, selector: str) -> tuple[float, float]:
    """Return the ARI and the test NLL per dim of the true parameters."""
    from bnet_transformer.inference import Evidence, log_evidence, posterior

    module, observed = net.module(), {"y": Evidence(y)}
    with torch.no_grad():
        nll = -float(log_evidence(module, observed, x).sum()) / y.numel()
    return adjusted_rand_score(c, posterior(module, selector, observed, x).argmax(-1)), nll


def evaluate_restarts(per: str, sigma: float, restarts: int, steps: int) -> list[tuple[float, float]]:
    """Return the held-out log likelihood per dim and the test ARI of every restart (none pruned), the best first.

    Both are the values at which the best restart is chosen, before it is trained further with the held-out sentences.
    """
    selector = "c_0" if per == "word" else "c"
    true, net = create_planted(per, sigma), create_mixture(per, sigma, HEADS)
    x, y, _ = sample_sentences(true, selector, LEARN, seed=1)
    tx, ty, tc = sample_sentences(true, selector, JUDGE, seed=2)
    with tempfile.TemporaryDirectory() as folder:
        method = bt.MAP(restarts=restarts, steps=steps, prune=False)
        f = bt.fit(net, (x, y), method=method, spread=SPREAD, checkpoints=folder, progress=False)
        retained = checkpoint.read_checkpoint(Path(folder, checkpoint.FILE_NAME), net.network)
    scores = {restart: score for step, restart, score in f.measured if step == retained.step}
    result = []
    for position, owner in enumerate(retained.get_tensors("story")["who"].tolist()):
        restart_net = net.replace({name: value[position] for name, value in retained.get_tensors("all").items()})
        result.append((scores[owner] / (WORDS * DIM), evaluate_parameters(restart_net, tx, ty, tc, selector)[0]))
    return sorted(result, reverse=True)


def measure_restarts(per: str, sigma: float, restarts: int, steps: int) -> Row:
    """Return the measured row of all restarts."""
    scores = ", ".join(f"{score:.4f} ({ari:.3f})" for score, ari in evaluate_restarts(per, sigma, restarts, steps))
    subject = f"{per} {sigma:g}, all {restarts} restarts: held-out log likelihood per dim (ARI)"
    return Row((subject, "", scores, "report"), None)


def measure_heads(
    per: str, sigma: float, ari_gap: float | None, nll_gap: float | None, restarts: int, steps: int
) -> Row:
    """Fit one row; it lists every restart that was not pruned."""
    selector = "c_0" if per == "word" else "c"
    true = create_planted(per, sigma)
    x, y, _ = sample_sentences(true, selector, LEARN, seed=1)
    tx, ty, tc = sample_sentences(true, selector, JUDGE, seed=2)
    oracle_ari, oracle_nll = evaluate_parameters(true, tx, ty, tc, selector)
    start = time.perf_counter()
    net = create_mixture(per, sigma, HEADS)
    f = bt.fit(net, (x, y), method=bt.MAP(restarts=restarts, steps=steps), spread=SPREAD, progress=False)
    spent = time.perf_counter() - start
    ari = adjusted_rand_score(tc, f.responsibilities((tx, ty)).argmax(-1))
    nll = -float(f.log_likelihood((tx, ty)).sum()) / ty.numel()
    is_reached = (
        None if ari_gap is None else ari >= oracle_ari - ari_gap and (nll_gap is None or nll <= oracle_nll + nll_gap)
    )
    end = max(step for step, _, _ in f.measured)
    last = sorted((score for step, _, score in f.measured if step == end), reverse=True)
    g = bt.fit(true, (x, y), method=bt.MAP(steps=200, rate=0.01), batch=LEARN, spread=SPREAD, progress=False)
    ari_from_truth = adjusted_rand_score(tc, g.responsibilities((tx, ty)).argmax(-1))
    scores = ", ".join(f"{score / (WORDS * DIM):.4f}" for score in last)
    target = (
        "report"
        if ari_gap is None
        else f"ARI ≥ {oracle_ari - ari_gap:.3f}" + ("" if nll_gap is None else f", NLL ≤ {oracle_nll + nll_gap:.4f}")
    )
    cells = (
        f"{per} {sigma:g}",
        f"{oracle_ari:.3f}",
        f"{ari_from_truth:.3f}",
        f"{ari:.3f}",
        f"{oracle_nll:.4f}",
        f"{nll:.4f}",
        target,
        scores,
        f"{spent:.0f} s",
    )
    return Row(cells, is_reached)


def measure_sum(steps: int) -> Row:
    """Measure the deterministic sum of four heads, trained on the same sentences, next to the mixture (sentence, sigma
    1)."""
    true = create_planted("sentence", 1.0)
    x, y, _ = sample_sentences(true, "c", LEARN, seed=1)
    tx, ty, _ = sample_sentences(true, "c", JUDGE, seed=2)
    f = bt.fit(create_mixture("sentence", 1.0, HEADS), (x, y), method=bt.MAP(restarts=4, steps=steps), progress=False)
    mixture_nll = -float(f.log_likelihood((tx, ty)).sum()) / ty.numel()
    net = bt.bayesuvius(DIM, heads=HEADS, key_dim=KEY, combine="concat", observe=Normal(1.0))
    g = bt.fit(net, (x, y), method=bt.MAP(restarts=4, steps=2 * steps), progress=False)
    sum_nll = -float(g.log_likelihood((tx, ty)).sum()) / ty.numel()
    sigma, best = fit_sigma(g.predict(tx), ty)
    text = f"{sum_nll:.4f} at sigma 1, {sum_nll - mixture_nll:.4f} more; {best:.4f} at its own best sigma {sigma:.3f}, "
    text += f"{best - mixture_nll:.4f} more"
    return Row(
        ("mixture, sum of 4 heads: NLL per dim", f"{mixture_nll:.4f}", text, "0.2 more, at its best sigma"),
        best - mixture_nll >= 0.2,
    )


def fit_sigma(predicted: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the maximum-likelihood sigma of a Normal readout around the predictions, and its NLL per dim."""
    square = float((y - predicted).double().square().mean())
    return math.sqrt(square), 0.5 * math.log(2 * math.pi * math.e * square)


def measure_offered(restarts: int, steps: int) -> Row:
    """Fit eight heads to data of four heads."""
    true = create_planted("sentence", 1.0)
    x, y, _ = sample_sentences(true, "c", LEARN, seed=1)
    tx, ty, tc = sample_sentences(true, "c", JUDGE, seed=2)
    f = bt.fit(create_mixture("sentence", 1.0, 8), (x, y), method=bt.EM(restarts=restarts, steps=steps), progress=False)
    nll = -float(f.log_likelihood((tx, ty)).sum()) / ty.numel()
    ari = adjusted_rand_score(tc, f.responsibilities((tx, ty)).argmax(-1))
    shares = ", ".join(f"{p:.3f}" for p in sorted(f.pi.tolist(), reverse=True))
    text = f"{f.heads.live} live, {f.heads.effective:.2f} in effect ({shares})"
    return Row(("8 offered, 4 exist", text, f"ARI {ari:.3f}, NLL {nll:.4f}", "report"), None)


def create_codebook(atoms: int, seed: int, sigma: float) -> bt.BNet:
    """Return a net whose heads draw from atoms by planted rows, Dirichlet(0.3)."""
    net = bt.bayesuvius(DIM, heads=HEADS, atoms=atoms, key_dim=KEY, observe=Normal(sigma), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    parameters = {"c.logits": PI.log()}
    rows = torch.distributions.Gamma(torch.full((3, HEADS, atoms), 0.3), torch.ones(()))
    torch.manual_seed(seed)
    sampled = rows.sample().clamp(min=1e-12)
    for k, role in enumerate("qkv"):
        parameters[f"W_{role}_0.logits"] = (sampled[k] / sampled[k].sum(-1, keepdim=True)).log()
        scale = 1 / math.sqrt(DIM) if role == "v" else math.sqrt(2 / DIM)
        shape = (atoms, DIM if role == "v" else KEY, DIM)
        parameters[f"W_{role}_0.atoms"] = scale * torch.randn(shape, generator=generator)
    return net.replace(parameters)


def total_variation(true: bt.BNet, pi: Tensor, theta: list[Tensor]) -> float:
    """Return the pi-weighted total variation between planted and fitted rows, with matched heads: the mean over the
    roles."""
    weights = true.parameters["c.logits"].softmax(-1)
    planted_rows = [true.parameters[f"W_{role}_0.logits"].softmax(-1) for role in "qkv"]
    distances = torch.stack(
        [(a[:, None] - b).abs().sum(-1) / 2 for a, b in zip(planted_rows, theta, strict=True)]
    ).mean(0)
    match = torch.tensor(match_heads(-distances - (weights[:, None] - pi).abs()))
    return float((weights * distances[torch.arange(len(match)), match]).sum())


def fit_observed_atoms(
    states: list[Tensor], atoms: int, restarts: int = 20, steps: int = 500
) -> tuple[Tensor, list[Tensor]]:
    """Fit by EM with observed atoms in each sentence, so that only its head is latent: the lower bound."""
    observed = [functional.one_hot(s, atoms).double() for s in states]
    best: tuple[float, Tensor, list[Tensor]] | None = None
    for r in range(restarts):
        generator = torch.Generator().manual_seed(r)
        pi = torch.full((HEADS,), 1 / HEADS, dtype=torch.float64)
        theta = [
            torch.rand(HEADS, atoms, generator=generator, dtype=torch.float64).log_softmax(-1).exp() for _ in observed
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


def measure_codebook(sentences: int = 20_000, atoms: int = 6, sigma: float = 1.0) -> Row:
    """Fit planted rows of theta with known atoms, by EM on the exact marginal."""
    true = create_codebook(atoms, seed=0, sigma=sigma)
    torch.manual_seed(1)
    x = torch.randn(sentences, WORDS, DIM)
    sample = true.pyro(parameters="own")(x)
    y = sample["y"].reshape(sentences, WORDS, DIM)
    tables = ["c.logits", *(f"W_{role}_0.logits" for role in "qkv")]
    fresh = bt.bayesuvius(DIM, heads=HEADS, atoms=atoms, key_dim=KEY, observe=Normal(sigma), seed=5)
    net = true.replace({name: fresh.parameters[name] for name in tables})
    start = time.perf_counter()
    f = bt.fit(net, (x, y), method=bt.EM(restarts=8, steps=200), learn=tables, every=200, progress=False)
    spent = time.perf_counter() - start
    states = [sample[f"W_{role}_0"].reshape(-1).long() for role in "qkv"]
    floor = total_variation(true, *fit_observed_atoms(states, atoms))
    tv = total_variation(true, f.pi, [f.theta[f"W_{role}_0"] for role in "qkv"])
    text = f"{tv:.4f}"
    return Row(("codebook: TV of theta, pi-weighted", f"{floor:.4f}", text, "TV ≤ 0.05", f"{spent:.0f} s"), tv <= 0.05)


def measure_page(restarts: int, steps: int, only: str | None, report: Callable[[str], None]) -> str:
    """Measure all rows, print each when it is done, and return the page."""
    lines = [
        "| selector, sigma | oracle ARI | ARI, started at the truth | ARI | oracle NLL | NLL | target "
        "| restarts (held-out log likelihood per dim) | time | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    report("\n".join(lines))
    for per, sigma, ari_gap, nll_gap in ROWS:
        if only in (None, f"{per} {sigma:g}"):
            lines.append(str(measure_heads(per, sigma, ari_gap, nll_gap, restarts, steps)))
            report(lines[-1])
    extra_lines = ["| what | of | found | target | |", "|---|---|---|---|---|"]
    extra_rows = {
        "restarts": lambda: measure_restarts("sentence", 3.0, restarts, steps),
        "sum": lambda: measure_sum(steps),
        "offered": lambda: measure_offered(restarts, steps),
        "codebook": measure_codebook,
    }
    for name, measure in extra_rows.items():
        if only in (None, name):
            extra_lines.append(str(measure()))
            report(extra_lines[-1])
    when = (
        f"{datetime.date.today()}, {platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    text = __doc__ or ""
    return (
        f"# Recovery of planted heads\n\nMeasured on {when}, by `python -m benchmarks.head_recovery "
        f"--restarts {restarts} --steps {steps}`.\n\n{text[text.index('Data:') :]}\n"
        + "\n".join(lines)
        + "\n\n"
        + "\n".join(extra_lines)
        + "\n"
    )


def main() -> None:
    """Parse the arguments, measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--restarts", type=int, default=RESTARTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only")
    args = parser.parse_args()
    text = measure_page(args.restarts, args.steps, args.only, lambda line: print(line, flush=True))
    if args.only is None:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

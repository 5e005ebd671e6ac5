"""The Monte Carlo error of the mean of rho covers the exact mean, also if the posterior has two modes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.attention.gates import exact_gate_posterior, gibbs_gate_posterior, tempered_log_likelihood

# Sentences, nats that both gates of a sentence must differ, nats by which the first head is preferred.
TABLES = {"one mode": (4, 0.5, 0.0), "broad": (12, 1.0, 0.0), "two modes": (12, 6.0, 0.02), "far": (40, 8.0, 0.005)}


def build_table(name: str) -> Tensor:
    """`log P` of sentences in each setting of two gates, of which exactly one should be on, `[sentence, setting]`."""
    sentences, gap, preference = TABLES[name]
    table = torch.tensor([-gap, preference, 0.0, -gap], dtype=torch.float64).repeat(sentences, 1)
    generator = torch.Generator().manual_seed(0)
    return table + 0.3 * torch.randn(table.shape, generator=generator, dtype=torch.float64)


def compute_mean(table: Tensor, points: int = 400) -> Tensor:
    """The exact posterior mean of rho, by a grid over both shares, `[head]`."""
    axis = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    rho = torch.cartesian_prod(axis, axis)
    return tempered_log_likelihood(table, rho, 1.0).softmax(0) @ rho


@dataclass
class TableRuns:
    """Runs of two gates whose `log P` are those of a table."""

    table: Tensor
    num_heads: int = 2
    sites: tuple[str, ...] = ("a_0",)
    corpus: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.corpus = list(range(len(self.table)))

    def gradient_part_size(self) -> int:
        """All sentences."""
        return len(self.table)

    def parts(self, _: int) -> list[Part]:
        """One part."""
        return [Part(torch.arange(len(self.table)))]

    def log_probs_by_chain(self, part: Part, gates: Tensor) -> Tensor:
        """`log P` of the gates `[sentence, chain, site, head]`."""
        setting = (gates[:, :, 0].long() * torch.tensor([1, 2])).sum(-1)
        return self.table[part.indices].gather(1, setting)


@dataclass
class Part:
    """Sentences of a part."""

    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)


def sample_exact(table: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The mean of rho and its error of the exact method, `[head]`."""
    result = exact_gate_posterior(table, 1000, torch.Generator().manual_seed(seed), lambda _: None)
    return result.rho.mean(0), result.rho_error


def sample_gibbs(table: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The mean of rho and its error of the chains, `[head]`."""
    runs, generator = TableRuns(table), torch.Generator().manual_seed(seed)
    result = gibbs_gate_posterior(runs, 1.0, 24, 1000, generator, lambda _: None)  # type: ignore[arg-type]
    return result.rho.mean(0).flatten(), result.rho_error.flatten()


def compute_deviations(sample, name: str, replications: int) -> tuple[Tensor, int]:
    """The deviation of the first head's mean in errors, of each replication with an error; and their number."""
    table = build_table(name)
    exact = compute_mean(table)
    pairs = [sample(table, seed) for seed in range(replications)]
    deviations = torch.stack([((mean - exact) / error)[0] for mean, error in pairs])
    known = deviations[~deviations.isnan()]
    return known, len(known)


@pytest.mark.slow
def test_the_error_of_the_exact_method_covers_the_exact_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnet_transformer.attention.gates._log_bayes_factor", lambda *_: torch.zeros(2).double())
    deviations = torch.cat([compute_deviations(sample_exact, name, 25)[0] for name in TABLES])
    assert (deviations.abs() < 2).double().mean() > 0.87
    assert deviations.square().mean() > 0.2  # an error that is far too large would cover everything


@pytest.mark.slow
def test_the_error_of_chains_covers_the_exact_mean_or_is_not_given() -> None:
    known = {name: compute_deviations(sample_gibbs, name, 12) for name in TABLES}
    deviations = torch.cat([values for values, _ in known.values()])
    assert (deviations.abs() < 2).double().mean() > 0.8
    assert known["one mode"][1] == 12
    assert known["far"][1] < 12  # chains that stay in one of two modes have no error


def test_the_table_has_the_error_of_rho_and_svi_says_what_its_error_leaves_out() -> None:
    net = bt.decoder(dim=4, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    texts = ["the cat sat", "sat the cat"]
    exact = bt.inclusion(net, texts, draws=50, progress=False)
    assert exact.rho_error.shape == exact.mean.shape and bool((exact.rho_error > 0).all())
    assert "rho_error" in exact.to_dataframe()
    svi = bt.inclusion(net, texts, method="svi", rounds=3, draws=50, progress=False)
    assert bool(svi.rho_error.isnan().all()) and "leaves out" in str(svi) and "rho_error" not in svi.by_head()
    gibbs = bt.inclusion(net, texts, method="gibbs", rounds=8, draws=50, progress=False)
    assert torch.equal(gibbs.rho_error.isnan(), ~gibbs.has_interval)

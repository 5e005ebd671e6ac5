"""Dirichlet priors with a concentration for each state, or for each entry of a table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from torch.distributions import Dirichlet

import bnet_transformer as bt
from bnet_transformer import tpm
from bnet_transformer.data import read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.learning.fit.heads import align_heads
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from tests.cases import CASES, Case, batch_evidence, batch_inputs, close, jitter

pytestmark = pytest.mark.slow

COUNTS = torch.tensor([[5.0, 1.0, 0.0], [2.0, 0.0, 6.0]], dtype=torch.float64)  # [c, y]
PRIORS = [[1.5, 2.0, 4.0], [3.0, 1.0, 2.5]]


def with_priors(part: Any, tables: dict[int, tuple[int, ...]]) -> Any:
    """Replace the priors of the learned tables of a declaration; every second one by an array of the table's shape."""
    if isinstance(part, tuple):
        return tuple(with_priors(item, tables) for item in part)
    if isinstance(part, tpm.TPM):
        if id(part) not in tables:
            return part
        shape = tables[id(part)]
        generator = np.random.default_rng(sum(shape))
        return dataclasses.replace(part, prior=(0.5 + 3 * generator.random(shape)).tolist())  # type: ignore[call-arg]
    if dataclasses.is_dataclass(part) and not isinstance(part, type | bt.Reach):
        fields = {f.name: with_priors(getattr(part, f.name), tables) for f in dataclasses.fields(part) if f.init}
        return dataclasses.replace(part, **fields)
    return part


def build_with_priors(net: bt.BNet) -> bt.BNet | None:
    """The net with other concentrations for each state; None if no table is learned."""
    tables = {}
    for k, spec in enumerate(net.network.specs):
        logits = spec.parameters.get("logits")
        if logits is not None and logits.learnable and hasattr(spec.tpm, "prior"):
            is_array = k % 2 and "initial" not in spec.parameters
            tables.setdefault(id(spec.tpm), logits.shape if is_array else logits.shape[-1:])
    shared = [spec.tpm for spec in net.network.specs if id(spec.tpm) in tables]
    if not tables or any(len({s.shape for s in net.network.specs if s.tpm is t}) > 1 for t in shared):
        return None
    return bt.BNet(with_priors(net.declaration, tables)).replace(net.parameters).to(torch.float64)


PRIOR_CASES = [case for case in CASES if build_with_priors(case.build()) is not None]


@pytest.mark.parametrize("case", PRIOR_CASES, ids=lambda case: case.name)
def test_rows_have_the_density_of_their_concentrations(case: Case, tmp_path: Path) -> None:
    net = build_with_priors(jitter(case.build()))
    assert net is not None
    net.save(tmp_path / "net.safetensors")
    assert bt.load(tmp_path / "net.safetensors").declaration == net.declaration
    assert r"\operatorname{Dirichlet}(" in net.equations().latex
    alphas = {f"{s.param_prefix}.{name}": alpha for s in net.network.specs for name, alpha in s.priors.items()}
    names = [name for name in alphas if name in net.network.learnable]
    assert names and any(bool((alphas[name] != alphas[name].flatten()[0]).any()) for name in names)
    tables = {name: alphas[name].expand(net.parameters[name].shape) for name in names}
    check_objective(net, tables)
    if case.evidence and case.name not in {"recurrent, lstm"}:
        check_pyro(case, net, tables)


def check_objective(net: bt.BNet, tables: dict[str, torch.Tensor]) -> None:
    """Compare the log prior of a fit with the density of torch, up to a constant."""
    try:
        readouts = infer_fit_task(net.network).readouts
    except bt.BNetError:
        return
    learned = select_learnable(net.network, readouts, None, None)
    objective = FitObjective(net.network, learned, 2**16)
    first = {name: net.parameters[name] for name in learned.names}
    second = {name: value.flip(-1) for name, value in first.items()}
    sets = {name: torch.stack([first[name], second[name]]) for name in first}
    densities = torch.stack(
        [
            sum(Dirichlet(tables[name]).log_prob(v[name].softmax(-1)).sum() for name in tables.keys() & v.keys())
            for v in (first, second)
        ]
    )
    close(objective.log_prior(sets).diff(), densities.diff(), 1e-8)


def check_pyro(case: Case, net: bt.BNet, tables: dict[str, torch.Tensor]) -> None:
    """Compare the sites of the tables of the Pyro model with the density of torch."""
    model, s = net.pyro(), net.sentence(case.text).observe(case.evidence)
    evidence = batch_evidence(s)
    trace = pyro.poutine.trace(model).get_trace(
        given=batch_inputs(s),
        y={name: item.value for name, item in evidence.items()},
        observed_mask={name: item.observed for name, item in evidence.items()},
    )
    for name in tables.keys() & model.priors.keys():
        site = trace.nodes[model.priors[name]]
        close(site["fn"].log_prob(site["value"]), Dirichlet(tables[name]).log_prob(site["value"]).sum())


def build_counted(prior: Any, kind: str = "Categorical", *, learnable: bool = True) -> bt.BNet:
    """Two observed discrete nodes, c and y, with a prior on the table of y."""
    table = [[0.3, 0.3, 0.4], [0.2, 0.5, 0.3]]
    y = tpm.Table(table, learnable=learnable, prior=prior) if kind == "Table" else tpm.Categorical(3, prior=prior)
    return bt.BNet(bt.Declaration(nodes=[bt.Node("c", tpm.Categorical(2)), bt.Node("y", y, ["c"])])).to(torch.float64)


def repeat_counts() -> dict[str, list[int]]:
    """Days with these counts of c and y."""
    pairs = [(c, y) for c in range(2) for y in range(3) for _ in range(int(COUNTS[c, y]))]
    return {"c": [c for c, _ in pairs], "y": [y for _, y in pairs]}


@pytest.mark.parametrize("kind", ["Categorical", "Table"])
@pytest.mark.parametrize("prior", [2.0, PRIORS[0], PRIORS, np.array(PRIORS), torch.tensor(PRIORS)], ids=str)
@pytest.mark.parametrize("method", ["em", "map"])
def test_point_estimates_are_the_mode_of_the_posterior(kind: str, prior: Any, method: str) -> None:
    fitted = bt.fit(build_counted(prior, kind), repeat_counts(), method=method, progress=False)
    mode = COUNTS + torch.as_tensor(prior, dtype=torch.float64) - 1
    close(fitted.net.parameters["y.logits"].softmax(-1), mode / mode.sum(-1, keepdim=True), 1e-4)


@pytest.mark.parametrize(
    "method",
    [
        bt.Laplace(draws=1500),
        pytest.param(bt.SVI(steps=800), marks=pytest.mark.slow),
        pytest.param(bt.NUTS(draws=600, warmup=200, chains=1), marks=pytest.mark.slow),
    ],
    ids=lambda method: method.name,
)
def test_posterior_means_are_those_of_the_conjugate_dirichlet(method: Any) -> None:
    prior = [[0.5, 2.0, 4.0], [3.0, 0.7, 2.5]]
    fitted = bt.fit(build_counted(prior), repeat_counts(), method=method, spread=1.0, progress=False)
    posterior = Dirichlet(COUNTS + torch.tensor(prior, dtype=torch.float64))
    close(fitted.samples["y.logits"].flatten(0, -3).mean(0), posterior.mean, 0.02)


def test_atoms_of_a_codebook_have_their_own_concentrations() -> None:
    net = bt.bayesuvius(4, heads=2, atoms=2, observe=tpm.Categorical(3), prior=1.0)
    assert [alpha.shape for alpha in net.network.get_spec("W_q_0").priors.values()] == [()]
    book = tpm.Codebook(3, 4, prior=(1, 2, 3))
    assert book.priors() == {"logits": (1.0, 2.0, 3.0)}


@pytest.mark.parametrize("wrong", [(1, 2), (1, 2, 0), (1, 2, -3), "x", True, float("nan"), (), [[1, 2, 3]]], ids=str)
@pytest.mark.parametrize("make", [tpm.Categorical, lambda n, prior: tpm.Codebook(n, 4, prior=prior)])
def test_a_prior_of_another_length_or_sign_is_an_error(make: Any, wrong: object) -> None:
    with pytest.raises(bt.BNetError, match="prior"):
        bt.BNet(bt.Declaration(nodes=[bt.Node("c", make(3, prior=wrong))]))


def test_a_table_of_concentrations_does_not_fit_the_first_word_of_a_chain() -> None:
    def build(prior: object) -> bt.BNet:
        chain = bt.Node("c", tpm.Categorical(2, prior=prior), [bt.Arrow("c", "before")], plates=["word"])
        return bt.BNet(bt.Declaration([bt.Stack(prologue=[bt.Node("x", tpm.Given(3), plates=["word"]), chain])]))

    priors = build((1, 2)).network.get_spec("c").priors
    close(priors["initial"], torch.tensor([1.0, 2.0]))
    with pytest.raises(bt.BNetError, match="initial"):
        build([[1, 2], [3, 4]])


def test_heads_with_different_concentrations_are_not_exchangeable() -> None:
    """The draws of a net with a symmetric prior are aligned over heads; those of another prior keep their heads."""
    x = torch.randn(6, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    aligned = []
    for prior in (2.0, (2.0, 5.0)):
        net = bt.bayesuvius(3, heads=2, observe=tpm.Normal(0.5), prior=prior).to(torch.float64)
        learned = select_learnable(net.network, infer_fit_task(net.network).readouts, None, 1.0)
        objective = FitObjective(net.network, learned, 2**16)
        samples = {name: torch.stack([net.parameters[name]] * 3)[None] for name in learned.names}
        samples["c.logits"] = samples["c.logits"].softmax(-1)
        aligned.append(align_heads(objective, read_batch(net.network, (x, x)), samples, torch.zeros(1, 3))[1])
    assert aligned == [("c",), ()]


def test_below_one_in_any_entry_a_point_estimate_does_not_exist() -> None:
    with pytest.raises(bt.BNetError, match="at least 1"):
        bt.fit(build_counted((0.5, 2, 3)), repeat_counts(), method="em", progress=False)

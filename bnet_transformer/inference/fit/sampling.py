"""`svi` and `nuts`: samples of the posterior, by Pyro, with the exact log evidence as a factor of the model."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor
from torch.distributions import biject_to
from tqdm import tqdm

from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.inference.fit.ascent import ascend
from bnet_transformer.inference.fit.corpus import Corpus
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.inference.fit.recipe import Habits, Recipe
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.inference.fit.samples import aligned
from bnet_transformer.inference.fit.variational import SIMPLEX, Drawn, Model, Variational, site
from bnet_transformer.network import Network
from bnet_transformer.training import checkpoint
from bnet_transformer.training.data import mixed
from bnet_transformer.training.parallel import Ranks

NARROW = "mean-field: the posterior is taken as independent by parameter, and its spread comes out too small"
DRAWN = "; choices are drawn, not summed, and taken as independent of each other given the sentence"
AT_ONCE, MOST = 32, 2**26  # draws computed at once; numbers of a table of log likelihoods that is still kept


def sampled(
    objective: Objective, recipe: Recipe, habits: Habits, corpus: Corpus, settings: dict[str, Any], ranks: Ranks
) -> Fit[Network]:
    """A fit with a posterior."""
    if ranks.world > 1:
        raise BNetError("method", expected="map or em under torchrun", got=recipe.method)
    if recipe.method == "nuts" and recipe.batch is not None and recipe.batch < len(corpus):
        wanted = f"None or all {len(corpus)} sentences: NUTS needs the whole likelihood"
        raise BNetError("batch", expected=wanted, got=recipe.batch, allowed="svi")
    by = _by_svi if recipe.method == "svi" else _by_nuts
    samples, bounds, measured, divergent, finished, choices = by(objective, recipe, habits, corpus, settings, ranks)
    evidence = None if choices else _log_likelihoods(objective, corpus, samples)
    if recipe.method == "nuts" and objective.learned.weights:
        samples = aligned(objective, corpus, samples, evidence)
    network = objective.network
    means = {name: value.mean((0, 1)) for name, value in samples.items()}
    means = {name: value.log() if name in objective.learned.tables else value for name, value in means.items()}
    return Fit(
        network.with_parameters(
            {**network.parameters, **{k: v.to(network.parameters[k].device) for k, v in means.items()}}
        ),
        recipe.method,
        len(corpus),
        "the sentences learned from",
        0,
        finished,
        NARROW + (DRAWN if choices else "") if recipe.method == "svi" else None,
        objective.learned.names,
        objective.budget,
        bounds,
        measured,
        samples,
        evidence,
        divergent,
        choices,
    )


def _log_likelihoods(objective: Objective, corpus: Corpus, samples: dict[str, Tensor]) -> Tensor | None:
    """The log evidence of each sentence under each draw, `[chain, draw, sentence]`; None where too large."""
    lead = next(iter(samples.values())).shape[:2]
    if lead.numel() * len(corpus) > MOST or objective.of_corpus:
        return None
    flat = {name: value.flatten(0, 1) for name, value in samples.items()}
    flat = {name: value.log() if name in objective.learned.tables else value for name, value in flat.items()}
    found = []
    with torch.no_grad():
        for start in range(0, lead.numel(), AT_ONCE):
            sets = {name: value[start : start + AT_ONCE] for name, value in flat.items()}
            found.append(torch.cat([objective.log_evidences(sets, part) for part in corpus.parts(1024)], 1))
    return torch.cat(found).reshape(*lead, -1)


Found = tuple[
    dict[str, Tensor], tuple[float, ...], tuple[tuple[int, int, float], ...], tuple[int, ...], bool, dict[str, Tensor]
]


def _by_svi(
    objective: Objective, recipe: Recipe, habits: Habits, corpus: Corpus, settings: dict[str, Any], ranks: Ranks
) -> Found:
    kind = Drawn if recipe.choices == "sampled" else Variational
    run = kind(objective, recipe, corpus, corpus, ranks, settings)
    finished = ascend(run, habits)
    torch.manual_seed(mixed(recipe.seed, "posterior"))
    guide = run.guide(run.sets.one(0))
    samples = {name: of.sample((1, recipe.draws)) for name, of in guide.items()}
    return samples, tuple(run.bounds), tuple(run.measured), (), finished, run.choices()


def _by_nuts(
    objective: Objective, recipe: Recipe, habits: Habits, corpus: Corpus, settings: dict[str, Any], ranks: Ranks
) -> Found:
    """Chain after chain, each kept when it is done."""
    path = None if habits.folder is None else checkpoint.path_of(habits.folder)
    chains: list[dict[str, Tensor]] = []
    if path is not None and path.exists():
        if not habits.resume:
            raise FileError(str(path), expected="no checkpoint yet", got="one", allowed="resume=True, another folder=")
        chains = _kept(path, objective.network, settings, habits.free)
    finished = True
    objective.keep(corpus)
    hide = True if habits.progress is False else False if habits.progress else None
    with tqdm(total=recipe.chains, initial=len(chains), disable=hide, unit="chain", leave=False) as bar:
        while len(chains) < recipe.chains and finished:
            try:
                chains.append(_chain(Model(objective), recipe, corpus, len(chains)))
            except KeyboardInterrupt:
                if not chains:
                    raise
                finished = False
            if path is not None:
                _keep(path, objective.network, chains, settings)
            bar.update()
    divergent = tuple(int(chain.pop("divergent")) for chain in chains)
    samples = {name: torch.stack([chain[name] for chain in chains]) for name in objective.learned.names}
    return samples, (), (), divergent, finished, {}


def _chain(model: Model, recipe: Recipe, corpus: Corpus, number: int) -> dict[str, Tensor]:
    """One chain, from the net's own parameters, moved a little."""
    pyro.set_rng_seed(mixed(recipe.seed, "chain", number) % 2**31)
    start = {}
    for name in model.learned.names:
        value = model.objective.network.parameters[name].detach()
        if name in model.learned.tables:
            theta = 0.9 * value.softmax(-1) + 0.1 / value.shape[-1]
            value = biject_to(SIMPLEX).inv(theta)
        start[site(name)] = value + 0.1 * torch.randn_like(value)
    with pyro.validation_enabled(False), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Pyro's own, of torch interfaces that go away
        kernel = NUTS(potential_fn=lambda z: model.potential(corpus, z))
        chain = MCMC(kernel, recipe.draws, warmup_steps=recipe.warmup, initial_params=start, disable_progbar=True)
        chain.run()
    found = {}
    for name in model.learned.names:
        value = chain.get_samples()[site(name)].detach()
        found[name] = biject_to(SIMPLEX)(value) if name in model.learned.tables else value
    divergences = chain.diagnostics().get("divergences", {})
    found["divergent"] = torch.tensor(sum(len(each) for each in divergences.values()))
    return found


def _keep(path: Path, network: Network, chains: list[dict[str, Tensor]], settings: dict[str, Any]) -> None:
    tensors = {f"net/{name}": value for name, value in network.parameters.items()}
    tensors |= {f"{k}/{name}": value for k, chain in enumerate(chains) for name, value in chain.items()}
    checkpoint.write(path, network, checkpoint.Checkpoint(len(chains), tensors, (), (), settings))


def _kept(path: Path, network: Network, settings: dict[str, Any], free: Collection[str]) -> list[dict[str, Tensor]]:
    found = checkpoint.read(path, network)
    checkpoint.check_settings(path, found, settings, free)
    return [found.part(str(k)) for k in range(found.step)]

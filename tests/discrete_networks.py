"""Two Bayesian networks without words, and oracles for them: pgmpy, and sums over all joint states."""

import itertools

import numpy as np
import torch
from pgmpy.factors.discrete import TabularCPD
from pgmpy.inference import VariableElimination
from pgmpy.models import DiscreteBayesianNetwork

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.tpm import Categorical, Table
from tests.cases import jitter

D = torch.float64
PARENTS = {
    "asia": (),
    "smoke": (),
    "tub": ("asia",),
    "lung": ("smoke",),
    "bronc": ("smoke",),
    "either": ("tub", "lung"),
    "xray": ("either",),
    "dysp": ("either", "bronc"),
}


def asia() -> bt.BNet:
    """The chest clinic of Lauritzen and Spiegelhalter (1988), with random tables."""
    nodes = [bt.Node(name, Categorical(2, labels=("no", "yes")), parents) for name, parents in PARENTS.items()]
    return jitter(bt.BNet(bt.Declaration(nodes=nodes, name="asia")), 1.0).to(D)


def get_tables(net: bt.BNet) -> dict[str, np.ndarray]:
    """Return `P(node | parents)`, with the state as the last axis."""
    return {name: net.parameters[f"{name}.logits"].softmax(-1).numpy() for name in PARENTS}


def to_pgmpy_model(net: bt.BNet) -> DiscreteBayesianNetwork:
    """Return the same net built from its tables, without the export of the package."""
    result = DiscreteBayesianNetwork([(parent, child) for child, parents in PARENTS.items() for parent in parents])
    for name, table in get_tables(net).items():
        parents = list(PARENTS[name])
        flat = table.reshape(-1, 2).T
        result.add_cpds(TabularCPD(name, 2, flat, evidence=parents or None, evidence_card=[2] * len(parents) or None))
    return result


def check_posteriors(net: bt.BNet, evidence: dict[str, int]) -> None:
    """Check posteriors of every node and of three nodes jointly, also those of the reference, against pgmpy."""
    s, oracle = net.sentence(), VariableElimination(to_pgmpy_model(net))
    fixed = {s.ground.id(name): torch.tensor(state) for name, state in evidence.items()}
    for name in PARENTS:
        if name not in evidence:
            peer = oracle.query([name], evidence=evidence, show_progress=False).values
            np.testing.assert_allclose(s.posterior(name, evidence), peer, atol=1e-12)
            if name == "lung":
                actual = reference.posterior(s.state.model, s.ground.id(name), fixed)
                np.testing.assert_allclose(actual, peer, atol=1e-12)
    names = [name for name in ("lung", "bronc", "tub") if name not in evidence]
    peer = oracle.query(names, evidence=evidence, show_progress=False)
    order = [peer.variables.index(name) for name in names]
    np.testing.assert_allclose(s.posterior(names, evidence), peer.values.transpose(order), atol=1e-12)


def joint(net: bt.BNet, do: dict[str, int] | None = None) -> np.ndarray:
    """Return `P(all nodes)`, an axis for each, as the product of the tables; the factor of a node set by `do` is a
    delta."""
    total = np.ones((2,) * len(PARENTS))
    names = list(PARENTS)
    for index in itertools.product(range(2), repeat=len(names)):
        states_by_name = dict(zip(names, index, strict=True))
        for name, table in get_tables(net).items():
            if do and name in do:
                total[index] *= float(states_by_name[name] == do[name])
            else:
                total[index] *= table[(*(states_by_name[parent] for parent in PARENTS[name]), states_by_name[name])]
    return total


def marginal(table: np.ndarray, name: str, observed: dict[str, int]) -> np.ndarray:
    """Return `P(name, observed)` from a joint table."""
    names = list(PARENTS)
    index = tuple(observed.get(node, slice(None)) for node in names)
    remaining = [node for node in names if node not in observed]
    return table[index].sum(tuple(k for k, node in enumerate(remaining) if node != name))


def draw_samples(net: bt.BNet, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(net.sentence().sample(count, seed=seed).states)


def site_density(net: bt.BNet, y: torch.Tensor) -> torch.Tensor:
    """Return `log p(y)` of the plate of choices, `[sentence]`, with torch's distributions."""
    p = net.parameters
    normal = torch.distributions.Normal(
        p["mean.values"], p["y.log_sigma"].exp()[:, None, None]
    )  # [site, state, feature]
    log_likelihood = normal.log_prob(y[:, :, None]).sum(-1)  # [sentence, site, state]
    given_z = p["x.logits"].log_softmax(-1)[None] + log_likelihood[:, :, None]  # [sentence, site, z, state]
    return (p["z.logits"].log_softmax(-1) + given_z.logsumexp(-1).sum(1)).logsumexp(-1)


def textbook() -> bt.BNet:
    """The chest clinic with its published tables: `either` is a function, so its table contains zeros and ones."""
    chances = {  # P(yes | parents), parents in the order of the declaration
        "asia": 0.01,
        "smoke": 0.5,
        "tub": [0.01, 0.05],
        "lung": [0.01, 0.1],
        "bronc": [0.3, 0.6],
        "either": [[0.0, 1.0], [1.0, 1.0]],
        "xray": [0.05, 0.98],
        "dysp": [[0.1, 0.8], [0.7, 0.9]],
    }
    yes = {name: torch.tensor(chance, dtype=D) for name, chance in chances.items()}
    tables = {name: Table(torch.stack([1 - p, p], -1), ("no", "yes"), learnable=True) for name, p in yes.items()}
    nodes = [bt.Node(name, tables[name], parents) for name, parents in PARENTS.items()]
    return bt.BNet(bt.Declaration(nodes=nodes, name="asia")).to(D)

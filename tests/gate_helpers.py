"""Helpers for tests of heads: small nets that sum heads, and reference runs with some heads set to zero."""

import numpy as np
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.interventions import Zero
from tests.cases import CASES, jitter

D = torch.float64
BY_NAME = {case.name: case for case in CASES}
VOCABULARY = ["the", "cat", "sat", "on", "a", "dog", "ran", "off", "mat"]
TEXTS = ["the cat sat", "a dog ran off the mat", "the dog sat", "a cat"]


def no_progress(_):
    """Report no progress."""


def inclusion(net, data, **options):
    return bt.inclusion(net, data, progress=False, **{"draws": 64, **options})


def concat_net(**options):
    kwargs = {"heads": 3, "slices": 2, "combine": "concat", "residual": True, **options}
    return jitter(bt.bayesuvius(4, **kwargs)).to(D)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


def get_names(s, group):
    """The names of the nodes of a group, `[head, word]`."""
    ground = s.ground
    node_group = ground.template.by_name[group]
    shape = ground.shapes[node_group.index]
    names = np.array([ground.name(n) for n in ground.select_nodes(node_group).tolist()])
    return names.reshape(-1, *shape[-1:]) if node_group.plates else names.reshape(shape)


def run_without(s, *off):
    """A reference run in which these heads are set to zero: pairs (group, head)."""
    ablated = s.do({name: Zero() for group, head in off for name in get_names(s, group)[head].ravel()})
    return reference.ReferenceRun(ablated.state.model, {})


def get_output(s, run, group):
    """The values, logits or means of the nodes of a group in a run."""
    kind = s.net.network.get_spec(group).tpm.kind
    ids = [s.ground.id(name) for name in get_names(s, group).ravel()]
    if kind == "deterministic":
        return torch.stack([run.value(node) for node in ids])
    distributions = [run.distribution(node) for node in ids]
    return torch.stack([dist.logits if kind == "discrete" else dist.mean for dist in distributions])


def log_prob(s, run, observed, output, full):
    """`log P(observed)` by group in a run, or `-|f - full|^2 / 2` of an output f."""
    if observed is None:
        return -0.5 * (get_output(s, run, output) - full).square().sum()
    total = torch.zeros((), dtype=D)
    for group, values in observed.items():
        names = get_names(s, group).ravel()
        for name, value in zip(names, values if get_names(s, group).ndim else [values], strict=True):
            if value is not None:
                state = torch.tensor(value, dtype=None if isinstance(value, int) else D)
                total += run.distribution(s.ground.id(name)).log_prob(state).sum()
    return total

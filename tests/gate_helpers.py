"""What the tests of heads share: small nets that sum heads, and runs by the reference with some heads at zero."""

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


def quiet(_):
    """No bar."""


def inclusion(net, data, **options):
    return bt.inclusion(net, data, progress=False, **{"draws": 64, **options})


def concat_net(**options):
    given = {"heads": 3, "slices": 2, "combine": "concat", "residual": True, **options}
    return jitter(bt.bayesuvius(4, **given)).to(D)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


def get_names(s, family):
    """The names of the nodes of a family, `[head, word]`."""
    ground = s.ground
    result = ground.template.by_name[family]
    shape = ground.shapes[result.index]
    names = np.array([ground.name(n) for n in ground.select_nodes(result).tolist()])
    return names.reshape(-1, *shape[-1:]) if result.plates else names.reshape(shape)


def run_without(s, *off):
    """A run by the reference, node by node, in which these heads are set to zero: (family, head)."""
    done = s.do({name: Zero() for family, head in off for name in get_names(s, family)[head].ravel()})
    return reference.ReferenceRun(done.state.model, {})


def get_output(s, run, family):
    """The nodes of a family in a run: values, log probabilities, means."""
    kind = s.net.network.get_spec(family).tpm.kind
    ids = [s.ground.id(name) for name in get_names(s, family).ravel()]
    if kind == "deterministic":
        return torch.stack([run.value(node) for node in ids])
    result = [run.distribution(node) for node in ids]
    return torch.stack([item.logits if kind == "discrete" else item.mean for item in result])


def log_prob(s, run, given, output, full):
    """`log P` of what is told of families in a run, or `-|f - full|^2 / 2` of an output f."""
    if given is None:
        return -0.5 * (get_output(s, run, output) - full).square().sum()
    total = torch.zeros((), dtype=D)
    for family, values in given.items():
        names = get_names(s, family).ravel()
        for name, value in zip(names, values if get_names(s, family).ndim else [values], strict=True):
            if value is not None:
                observed = torch.tensor(value, dtype=None if isinstance(value, int) else D)
                total += run.distribution(s.ground.id(name)).log_prob(observed).sum()
    return total

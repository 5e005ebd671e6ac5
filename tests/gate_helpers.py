"""What the tests of heads share: small nets that sum heads, and runs by the reference with some heads at zero."""

import numpy as np
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.interventions import Zero
from tests.cases import CASES, jolted

D = torch.float64
BY_NAME = {case.name: case for case in CASES}
VOCABULARY = ["the", "cat", "sat", "on", "a", "dog", "ran", "off", "mat"]
TEXTS = ["the cat sat", "a dog ran off the mat", "the dog sat", "a cat"]


def quiet(_):
    """No bar."""


def inclusion(net, data, **options):
    return bt.inclusion(net, data, progress=False, **{"draws": 64, **options})


def concat(**options):
    told = {"heads": 3, "slices": 2, "combine": "concat", "residual": True, **options}
    return jolted(bt.bayesuvius(4, **told)).to(D)


def close(got, wanted, tolerance=1e-9):
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(wanted), rtol=tolerance, atol=tolerance)


def nodes_of(s, family):
    """The names of the nodes of a family, `[head, word]`."""
    ground = s.ground
    found = ground.template.by_name[family]
    shape = ground.shapes[found.index]
    names = np.array([ground.name(n) for n in ground.select_nodes(found).tolist()])
    return names.reshape(-1, *shape[-1:]) if found.plates else names.reshape(shape)


def run_of(s, *off):
    """A run by the reference, node by node, in which these heads are set to zero: (family, head)."""
    done = s.do({name: Zero() for family, head in off for name in nodes_of(s, family)[head].ravel()})
    return reference.ReferenceRun(done.state.model, {})


def output_of(s, run, family):
    """The nodes of a family in a run: values, log probabilities, means."""
    kind = s.net.network.get_spec(family).tpm.kind
    ids = [s.ground.id(name) for name in nodes_of(s, family).ravel()]
    if kind == "deterministic":
        return torch.stack([run.value(node) for node in ids])
    found = [run.distribution(node) for node in ids]
    return torch.stack([each.logits if kind == "discrete" else each.mean for each in found])


def log_p(s, run, told, output, full):
    """`log P` of what is told of families in a run, or `-|f - full|^2 / 2` of an output f."""
    if told is None:
        return -0.5 * (output_of(s, run, output) - full).square().sum()
    total = torch.zeros((), dtype=D)
    for family, values in told.items():
        names = nodes_of(s, family).ravel()
        for name, value in zip(names, values if nodes_of(s, family).ndim else [values], strict=True):
            if value is not None:
                seen = torch.tensor(value, dtype=None if isinstance(value, int) else D)
                total += run.distribution(s.ground.id(name)).log_prob(seen).sum()
    return total

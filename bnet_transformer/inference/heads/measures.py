"""What else is said of heads: what it costs to shut one off (ablation), and how steep the loss is along its gate.

Importance is that of Michel, Levy and Neubig 2019 ("Are sixteen heads really better than one?"): `E_x |d loss / d xi|`
at `xi = 1`, which is `E_x |a^T d loss / d a|`. Where nothing is observed the loss has no slope there, for it is
measured against the full net: then `y` is drawn from `Normal(f(all on), sigma)`, several times for each sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.inference.heads.runs import Part, Runs

DRAWS = 8  # of y, for each sentence of which nothing is observed


def one_off(heads: int) -> Tensor:
    """The settings in which all heads are on, and those in which one is off: `[1 + heads, heads]`.

    >>> one_off(2).tolist()
    [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    """
    return torch.cat([torch.ones(1, heads), 1 - torch.eye(heads)]).double()


def ablation(runs: Runs, told: Callable[[int], None], memory: int) -> Tensor:
    """What `log P` of each sentence loses with one head off: `[sentence, site, head]`."""
    table = runs.table(one_off(runs.heads), told, memory)
    return (table[..., :1] - table[..., 1:]).transpose(0, 1)


@dataclass(frozen=True)
class Importance:
    """The mean size of the slope, `[site, head]`, and its standard error."""

    values: Tensor
    error: Tensor


def importance(runs: Runs, sigma: float | None, seed: int, told: Callable[[int], None], memory: int) -> Importance:
    """The mean size of the slope of the loss along each gate, all heads on."""
    found = torch.empty(len(runs.corpus), len(runs.sites), runs.heads, dtype=torch.float64)
    for part in runs.parts(runs.fitting(memory)):
        if sigma is None:
            found[part.which] = slopes(runs, part).abs()
        else:
            each = [slopes(runs, other).abs() for other in _drawn(runs, part, sigma, seed)]
            found[part.which] = torch.stack(each).mean(0) / sigma**2
        told(len(part))
    found = runs.ranks.all_gather(found)
    return Importance(found.mean(0), found.std(0) / len(found) ** 0.5 if len(found) > 1 else found[0] * torch.nan)


def slopes(runs: Runs, part: Part) -> Tensor:
    """`d log P / d gates` of each sentence with all heads on."""
    shape, dtype = (len(part), len(runs.sites), runs.heads), runs.module.network.dtype
    gates = torch.ones(shape, dtype=dtype, device=part.device).requires_grad_()
    (found,) = torch.autograd.grad(runs.gated(part, gates).sum(), gates)
    return found.double().cpu()


def _drawn(runs: Runs, part: Part, sigma: float, seed: int) -> Iterator[Part]:
    """The same sentences, with outputs drawn around the full one, by random numbers of each sentence's own."""
    assert part.full is not None
    full = part.full.expand(len(part), *part.full.shape[1:])
    noise = []
    for sentence in runs.ranks.places(part.which).tolist():
        own = torch.Generator().manual_seed(derive_seed(seed, "output", sentence))
        noise.append(torch.randn(DRAWS, *full.shape[1:], generator=own, dtype=torch.float64))
    for each in torch.stack(noise, 1):
        yield replace(part, full=full + sigma * each.to(full))

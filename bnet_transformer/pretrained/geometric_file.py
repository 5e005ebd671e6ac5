"""The parameter files of the Julia package GeometricMachineLearning.jl, as nets: `load_geometric`.

Such a file (HDF5) has a group for each layer, `L1`, `L2`, ..., and says nothing of the architecture: it follows from
what the layers hold. Julia counts columns first, so a matrix arrives transposed; structured ones are groups with their
free entries, `S` and `n` (or `storage` and `metadata/n`, as later versions write them).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bnet_transformer.bnet import BNet
from bnet_transformer.errors import BNetError, FileError, one_of
from bnet_transformer.files.atomic import as_path
from bnet_transformer.models.geometric import geometric
from bnet_transformer.models.volume_preserving import steps, volume_preserving
from bnet_transformer.pretrained.geometric_layers import Layer, file_to_layers
from bnet_transformer.tpm import TPM


def load_geometric(
    path: str | os.PathLike[str],
    *,
    attention: str | None = None,
    add: bool = False,
    activation: str = "tanh",
    observe: TPM | None = None,
) -> BNet:
    """The net of a parameter file of GeometricMachineLearning.jl; needs h5py, the extra `hdf5`.

    Architecture, dim, heads, slices (L) and blocks (n_blocks) follow from the layers, and so does the form of a
    volume-preserving attention: skew where a matrix A is packed or its type says so, else arbitrary. `attention`
    ("skew", "arbitrary") tells it of an A that was written out whole. What the file does not hold is told: whether the
    words are `add`ed to the attention of a standard transformer (`add_connection`; its tutorials do not) and the
    `activation`. `observe` is a readout, as in `bt.geometric`.
    """
    where = as_path(path)
    one_of("add", add, (True, False))
    one_of("attention", attention, (None, "skew", "arbitrary"))
    layers = file_to_layers(where)
    first = layers[0]
    if first.kind not in ("matrix", "skew") and attention is not None:
        wanted = "None, for the file has no volume-preserving attention"
        raise BNetError("attention", expected=wanted, got=attention)
    if first.kind == "heads":
        return _standard(where, layers, add, activation, observe)
    if first.kind == "dense" and first.as_a("lower") is None:
        wanted = "attention (PQ, PK, PV or A) or a triangular layer first"
        raise FileError(f"{where}: L1", expected=wanted, got="a dense layer, as a net that widens its words has it")
    if add:
        raise BNetError("add", expected="False, for the file has no standard transformer", got=add)
    return _volume_preserving(where, layers, attention, activation, observe)


@dataclass(frozen=True)
class _Unit:
    """One unit: its attention, where it has one, and the layers after it."""

    attention: Layer | None
    rest: tuple[Layer, ...]


def _standard(where: Path, layers: Sequence[Layer], add: bool, activation: str, observe: TPM | None) -> BNet:
    """Units of heads, `n_blocks` ResNet layers and one more."""
    units = _units(where, layers, ("heads",))
    blocks = len(units[0].rest) - 1
    for unit in units:
        _check(where, unit.rest, ["dense"] * len(unit.rest), [True] * len(unit.rest))
    if blocks < 1:
        raise FileError(f"{where}: L1", expected="at least two ResNet layers after attention", got=blocks + 1)
    heads = len(layers[0].tensors["q"])
    for layer in (unit.attention for unit in units):
        if layer is not None and len(layer.tensors["q"]) != heads:
            raise FileError(f"{where}: {layer.name}", expected=f"{heads} heads, as L1", got=len(layer.tensors["q"]))
    net = geometric(
        layers[0].dim, slices=len(units), blocks=blocks, heads=heads, add=add, activation=activation, observe=observe
    )
    found: dict[str, Tensor] = {}
    for t, unit in enumerate(units):
        assert unit.attention is not None
        found |= {f"W_{role}_{t}.value": value for role, value in unit.attention.tensors.items()}
        for owner, part in ((f"resnet_{t}", unit.rest[:-1]), (f"x_{t + 1}", unit.rest[-1:])):
            for name in ("weight", "bias"):
                found[f"{owner}.{name}"] = torch.stack([layer.tensors[name] for layer in part])
    return _with(net, found)


def _volume_preserving(
    where: Path, layers: Sequence[Layer], told: str | None, activation: str, observe: TPM | None
) -> BNet:
    """Units of attention, where there is one, and triangular layers; without attention all of them are one unit."""
    attends = layers[0].kind in ("matrix", "skew")
    units = _units(where, layers, ("matrix", "skew")) if attends else [_Unit(None, tuple(layers))]
    form = _form(where, [unit.attention for unit in units if unit.attention is not None], told) if attends else None
    blocks, left = divmod(len(units[0].rest) - 2, 4)
    if left or blocks < 1:
        wanted = "4 n_blocks + 2 triangular layers in a unit"
        raise FileError(str(where), expected=wanted, got=f"{len(units[0].rest)} layers")
    order = steps(blocks, activation)
    net = volume_preserving(
        layers[0].dim, slices=len(units), blocks=blocks, attention=form, activation=activation, observe=observe
    )
    found: dict[str, Tensor] = {}
    for t, unit in enumerate(units):
        if unit.attention is not None:
            A = _as_a(where, unit.attention, "skew" if form == "skew" else "matrix")
            found |= {f"A_{t}.{name}": value for name, value in A.tensors.items()}
        rest = _check(where, unit.rest, [side for side, _, _ in order], [bias for _, _, bias in order])
        for k, layer in enumerate(rest):
            owner = f"x_{t + 1}" if k + 1 == len(rest) else f"{order[k][0]}{k // 2 + 1}_{t}"
            found |= {f"{owner}.{name}": value for name, value in layer.tensors.items()}
    return _with(net, found)


def _form(where: Path, attention: Sequence[Layer], told: str | None) -> str:
    """The form of the attention of all units: what is told, else skew where one of them says so."""
    skew = next((layer for layer in attention if layer.kind == "skew"), None)
    if skew is not None and told == "arbitrary":
        raise FileError(f"{where}: {skew.name}", expected=_TOLD["matrix"] + ", as is told", got=_TOLD["skew"])
    return told or ("arbitrary" if skew is None else "skew")


def _units(where: Path, layers: Sequence[Layer], attention: Sequence[str]) -> list[_Unit]:
    """The layers from one attention to the next, as many in each."""
    starts = [k for k, layer in enumerate(layers) if layer.kind in attention]
    ends = [*starts[1:], len(layers)]
    units = [_Unit(layers[a], tuple(layers[a + 1 : b])) for a, b in zip(starts, ends, strict=True)]
    for unit in units:
        if len(unit.rest) != len(units[0].rest):
            name = unit.attention.name if unit.attention else ""
            wanted = f"{len(units[0].rest)} layers after attention, as after L1"
            raise FileError(f"{where}: {name}", expected=wanted, got=len(unit.rest))
    return units


def _as_a(where: Path, layer: Layer, kind: str) -> Layer:
    """A layer as one of that kind; a triangular one that does not say its side has the one that is due."""
    found = layer.as_a(kind)
    if found is None:
        raise FileError(f"{where}: {layer.name}", expected=_TOLD[kind], got=_TOLD[layer.kind])
    return found


def _check(where: Path, layers: Sequence[Layer], kinds: Sequence[str], biases: Sequence[bool]) -> list[Layer]:
    """Layers as those of these kinds, with a bias or without."""
    found = [_as_a(where, layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
    for layer, bias in zip(found, biases, strict=True):
        if ("bias" in layer.tensors) != bias:
            wanted = "a bias" if bias else "no bias (the first layer of a linear pair)"
            raise FileError(f"{where}: {layer.name}", expected=wanted, got="none" if bias else "one")
    return found


_TOLD: dict[str, str] = {
    "heads": "attention (PQ, PK, PV)",
    "matrix": "attention (A, a matrix)",
    "skew": "attention (A, skew-symmetric)",
    "dense": "a dense or ResNet layer",
    "lower": "a strictly lower triangular layer",
    "upper": "a strictly upper triangular layer",
    "triangular": "a triangular layer",
}


def _with(net: BNet, found: dict[str, Tensor]) -> BNet:
    """The net with the file's parameters, in the file's floating type."""
    dtype = next(iter(found.values())).dtype
    return net.to(dtype).replace(found)

"""The parameter files of the Julia package GeometricMachineLearning.jl, as nets: `load_geometric`.

Such a file (HDF5) has a group for each layer, `L1`, `L2`, ..., and says nothing of the architecture: it follows from
what the layers hold. Julia counts columns first, so a matrix arrives transposed; structured ones are groups with their
free entries, `S` and `n` (or `storage` and `metadata/n`, as later versions write them). A file comes from others: what
leads out of it is not followed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.files import as_path
from bnet_transformer._core.memory import check_memory
from bnet_transformer.bnet import BNet
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.models.geometric import geometric
from bnet_transformer.models.volume_preserving import steps, volume_preserving
from bnet_transformer.tpm import TPM
from bnet_transformer.tpm.attention import packed_size

SIDES = {"LowerTriangular": "lower", "UpperTriangular": "upper"}
TOLD: dict[str, str] = {
    "heads": "attention (PQ, PK, PV)",
    "matrix": "attention (A, a matrix)",
    "skew": "attention (A, skew-symmetric)",
    "dense": "a dense or ResNet layer",
    "lower": "a strictly lower triangular layer",
    "upper": "a strictly upper triangular layer",
    "triangular": "a triangular layer",
}


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
    check_choice("add", add, (True, False))
    check_choice("attention", attention, (None, "skew", "arbitrary"))
    layers = file_to_layers(where)
    first = layers[0]
    if first.kind not in ("matrix", "skew") and attention is not None:
        wanted = "None, for the file has no volume-preserving attention"
        raise BNetError("attention", expected=wanted, actual=attention)
    if first.kind == "heads":
        return _standard(where, layers, add, activation, observe)
    if first.kind == "dense" and first.as_a("lower") is None:
        wanted = "attention (PQ, PK, PV or A) or a triangular layer first"
        raise FileError(f"{where}: L1", expected=wanted, actual="a dense layer, as a net that widens its words has it")
    if add:
        raise BNetError("add", expected="False, for the file has no standard transformer", actual=add)
    return _volume_preserving(where, layers, attention, activation, observe)


def _standard(where: Path, layers: Sequence[Layer], add: bool, activation: str, observe: TPM | None) -> BNet:
    """Units of heads, `n_blocks` ResNet layers and one more."""
    units = _units(where, layers, ("heads",))
    blocks = len(units[0]) - 2
    if blocks < 1:
        raise FileError(f"{where}: L1", expected="at least two ResNet layers after attention", actual=blocks + 1)
    heads = len(layers[0].tensors["q"])
    found: dict[str, Tensor] = {}
    for t, (attention, *rest) in enumerate(units):
        _check(where, rest, ["dense"] * len(rest), [True] * len(rest))
        if len(attention.tensors["q"]) != heads:
            got = len(attention.tensors["q"])
            raise FileError(f"{where}: {attention.name}", expected=f"{heads} heads, as L1", actual=got)
        found |= {f"W_{role}_{t}.value": value for role, value in attention.tensors.items()}
        for owner, part in ((f"resnet_{t}", rest[:-1]), (f"x_{t + 1}", rest[-1:])):
            for name in ("weight", "bias"):
                found[f"{owner}.{name}"] = torch.stack([layer.tensors[name] for layer in part])
    net = geometric(
        layers[0].dim, slices=len(units), blocks=blocks, heads=heads, add=add, activation=activation, observe=observe
    )
    return net.to(next(iter(found.values())).dtype).replace(found)


def _volume_preserving(
    where: Path, layers: Sequence[Layer], told: str | None, activation: str, observe: TPM | None
) -> BNet:
    """Units of attention, where there is one, and triangular layers; without attention all of them are one unit."""
    attends = layers[0].kind in ("matrix", "skew")
    units = _units(where, layers, ("matrix", "skew")) if attends else [list(layers)]
    form = None
    if attends:  # of all units: what is told, else skew where one of them says so
        skew = next((unit[0] for unit in units if unit[0].kind == "skew"), None)
        if skew is not None and told == "arbitrary":
            raise FileError(f"{where}: {skew.name}", expected=TOLD["matrix"] + ", as is told", actual=TOLD["skew"])
        form = told or ("arbitrary" if skew is None else "skew")
    many = len(units[0]) - attends
    blocks, left = divmod(many - 2, 4)
    if left or blocks < 1:
        raise FileError(str(where), expected="4 n_blocks + 2 triangular layers in a unit", actual=f"{many} layers")
    order = steps(blocks, activation)
    net = volume_preserving(
        layers[0].dim, slices=len(units), blocks=blocks, attention=form, activation=activation, observe=observe
    )
    found: dict[str, Tensor] = {}
    for t, unit in enumerate(units):
        if attends:
            A = _as_a(where, unit[0], "skew" if form == "skew" else "matrix")
            found |= {f"A_{t}.{name}": value for name, value in A.tensors.items()}
        rest = _check(where, unit[attends:], [side for side, _, _ in order], [bias for _, _, bias in order])
        for k, layer in enumerate(rest):
            owner = f"x_{t + 1}" if k + 1 == len(rest) else f"{order[k][0]}{k // 2 + 1}_{t}"
            found |= {f"{owner}.{name}": value for name, value in layer.tensors.items()}
    return net.to(next(iter(found.values())).dtype).replace(found)


def _units(where: Path, layers: Sequence[Layer], attention: Sequence[str]) -> list[list[Layer]]:
    """The layers from each attention on, as many in each unit."""
    units: list[list[Layer]] = []
    for layer in layers:
        if layer.kind in attention:
            units.append([])
        units[-1].append(layer)
    for unit in units:
        if len(unit) != len(units[0]):
            wanted = f"{len(units[0]) - 1} layers after attention, as after L1"
            raise FileError(f"{where}: {unit[0].name}", expected=wanted, actual=len(unit) - 1)
    return units


def _as_a(where: Path, layer: Layer, kind: str) -> Layer:
    """A layer as one of that kind; a triangular one that does not say its side has the one that is due."""
    found = layer.as_a(kind)
    if found is None:
        raise FileError(f"{where}: {layer.name}", expected=TOLD[kind], actual=TOLD[layer.kind])
    return found


def _check(where: Path, layers: Sequence[Layer], kinds: Sequence[str], biases: Sequence[bool]) -> list[Layer]:
    """Layers as those of these kinds, with a bias or without."""
    found = [_as_a(where, layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
    for layer, bias in zip(found, biases, strict=True):
        if ("bias" in layer.tensors) != bias:
            wanted = "a bias" if bias else "no bias (the first layer of a linear pair)"
            raise FileError(f"{where}: {layer.name}", expected=wanted, actual="none" if bias else "one")
    return found


# the layers of a file


@dataclass(frozen=True)
class Layer:
    """One layer: what it is, its width, its tensors under our names.

    `kind` is `heads` (q, k, v: `[head, d / heads, d]`), `matrix` or `skew` (an attention's A, whole or packed),
    `dense` (weight, bias), `lower`, `upper`, or `triangular` where the file does not say which (packed, bias).
    """

    name: str
    kind: str
    dim: int
    tensors: Mapping[str, Tensor]

    def as_a(self, kind: str) -> Layer | None:
        """The same as a layer of that kind, its matrix packed where it was written out; None where it is none."""
        if self.kind == kind or (self.kind == "triangular" and kind in SIDES.values()):
            return self
        name = {"skew": "value", "lower": "weight", "upper": "weight"}.get(kind, "")
        if name not in self.tensors:
            return None
        W = self.tensors[name].mT if kind == "upper" else self.tensors[name]
        S = W.tril(-1)
        if not torch.equal(W, S - S.mT if kind == "skew" else S):
            return None
        row, column = torch.tril_indices(self.dim, self.dim, -1)
        rest = {key: value for key, value in self.tensors.items() if key != name}
        return Layer(self.name, kind, self.dim, {"packed": W[row, column], **rest})


def file_to_layers(where: Path) -> list[Layer]:
    """The layers of a file in their order, of one width and one floating type; what is wrong with it is a FileError."""
    try:
        import h5py
    except ImportError as error:
        allowed = 'pip install "bnet-transformer[hdf5]"'
        raise BNetError("load_geometric", expected="the package h5py", actual="none", allowed=allowed) from error
    try:
        if not where.is_file():
            raise FileError(str(where), expected="a file", actual="a folder" if where.is_dir() else "nothing there")
        if not h5py.is_hdf5(where):
            raise FileError(str(where), expected="an HDF5 file", actual="another format")
        with h5py.File(where, "r") as file:
            return _layers(where, _Part(where, file))
    except BNetError:
        raise
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, MemoryError) as error:  # as h5py tells faults
        raise FileError(str(where), expected="a sound HDF5 file", actual=str(error)) from error


def _layers(where: Path, file: _Part) -> list[Layer]:
    """The layers of an open file."""
    names = [f"L{k + 1}" for k in range(len(file.names))]
    missing = [name for name in names if name not in file.names]
    if not names or missing:
        got = f"no {missing[0]}, but {_listed(file.names)}" if names else "nothing in it"
        raise FileError(str(where), expected="groups L1, L2, ... without a gap, and no others", actual=got)
    parts = file.only(*names)
    layers = [_layer(name, parts[name]) for name in names]
    for layer in layers:
        if layer.dim != layers[0].dim:
            raise FileError(f"{where}: {layer.name}", expected=f"the width {layers[0].dim}, as L1", actual=layer.dim)
    dtypes = {f"{layer.name}/{name}": value.dtype for layer in layers for name, value in layer.tensors.items()}
    first = next(iter(dtypes))
    for name, dtype in dtypes.items():
        if dtype != dtypes[first]:
            raise FileError(f"{where}: {name}", expected=f"{dtypes[first]}, as {first}", actual=dtype)
    return layers


@dataclass(frozen=True)
class _Part:
    """A group or a dataset of an open file."""

    where: Path
    node: Any

    @property
    def names(self) -> list[str]:
        """The names of the parts of a group; a dataset has none."""
        return list(self.node) if hasattr(self.node, "keys") else []

    @property
    def told(self) -> str:
        """The type that its attributes tell, "" for none."""
        told = next((self.node.attrs[name] for name in ("gml_type", "parameter_type") if name in self.node.attrs), "")
        return (told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told)).rpartition(".")[2]

    def wrong(self, expected: str, got: object) -> FileError:
        """The error of a part that is not what is expected."""
        return FileError(f"{self.where}: {self.node.name.lstrip('/')}", expected=expected, actual=got)

    def only(self, *names: str, optional: Collection[str] = ()) -> dict[str, _Part]:
        """The parts of a group, which holds no more than these, nor less, and itself: no link is followed."""
        if not hasattr(self.node, "keys"):
            raise self.wrong("a group", f"a dataset of shape {self.node.shape}")
        if set(self.names) - set(names) or set(names) - set(optional) - set(self.names):
            raise self.wrong(_listed(names), _listed(self.names))
        for name in self.names:
            if type(self.node.get(name, getlink=True)).__name__ != "HardLink":
                raise FileError(
                    f"{self.where}: {f'{self.node.name}/{name}'.strip('/')}",
                    expected="a part of the file itself",
                    actual="a link",
                )
        return {name: _Part(self.where, self.node[name]) for name in self.names}

    def typed(self, *kinds: str) -> str:
        """The type that a structured matrix tells, one of these or ""."""
        if self.told not in ("", *kinds):
            raise self.wrong(" or ".join(kinds), self.told)
        return self.told

    def check_inside(self) -> None:
        """Refuse numbers that lie in another file, which might be a pipe, or a stranger's."""
        if self.node.external or self.node.is_virtual:
            raise self.wrong("numbers in the file itself", "numbers that lie in another file")

    def reals(self, rank: int) -> Tensor:
        """Real numbers of so many dims."""
        if not hasattr(self.node, "shape"):
            raise self.wrong("a dataset", f"a group of {_listed(self.names)}")
        self.check_inside()
        check_memory(self.node.name, self.node.nbytes, "a smaller net")
        found = np.asarray(self.node[()])
        if found.ndim != rank or not found.size:
            raise self.wrong(f"an array of {rank} dims with something in it", f"shape {found.shape}")
        if found.dtype.kind != "f" or found.dtype.itemsize > 8:
            raise self.wrong("real numbers", str(found.dtype))
        if not np.isfinite(found).all():
            raise self.wrong("finite numbers", "some that are not")
        return torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("="), order="C"))

    def vector(self, size: int) -> Tensor:
        """Real numbers, as many as they must be."""
        found = self.reals(1)
        if len(found) != size:
            raise self.wrong(f"a vector of {size}", f"shape {tuple(found.shape)}")
        return found

    def square(self) -> Tensor:
        """A square matrix, turned back."""
        found = self.reals(2)
        if found.shape[0] != found.shape[1]:
            raise self.wrong("a square matrix", tuple(found.shape))
        return found.mT.contiguous()

    def packed(self) -> tuple[Tensor, int]:
        """The free entries of a structured matrix, and its width."""
        if "storage" in self.names:
            parts = self.only("storage", "metadata")
            entries, size = parts["storage"], parts["metadata"].only("n")["n"]
        else:
            parts = self.only("S", "n")
            entries, size = parts["S"], parts["n"]
        if getattr(size.node, "size", 0) != 1 or size.node.dtype.kind not in "iu":
            raise size.wrong("a whole number", "something else")
        size.check_inside()
        dim = int(np.asarray(size.node[()]).item())
        if dim < 2:
            raise size.wrong("a width of at least 2", dim)
        return entries.vector(packed_size(dim)), dim


def _layer(name: str, part: _Part) -> Layer:
    """One layer, by what it holds."""
    if {"PQ", "PK", "PV"} & set(part.names):
        return _heads(name, part.only("PQ", "PK", "PV"))
    if "A" in part.names:
        return _attention(name, part.only("A")["A"])
    if "weight" not in part.names:
        part.only(*part.names)
        raise part.wrong("PQ, PK, PV; A; or weight (and bias)", _listed(part.names))
    parts = part.only("weight", "bias", optional=["bias"])
    weight = parts["weight"]
    if weight.names:
        kind = SIDES.get(weight.typed(*SIDES), "triangular")
        packed, dim = weight.packed()
        tensors = {"packed": packed}
    else:
        kind, tensors = "dense", {"weight": weight.square()}
        dim = len(tensors["weight"])
    return Layer(name, kind, dim, tensors | ({"bias": parts["bias"].vector(dim)} if "bias" in parts else {}))


def _heads(name: str, parts: Mapping[str, _Part]) -> Layer:
    """Projections of each head: Julia's `P` is `[d, d / heads]`, ours `W = P^T`, which is how it arrives.

    A head is a matrix, plain or on the Stiefel manifold (then a group that holds it).
    """
    found: dict[str, Tensor] = {}
    dim = heads = 0
    for role in "qkv":
        part = parts[f"P{role.upper()}"]
        names = [f"head_{k + 1}" for k in range(max(1, len(part.names)))]
        each = [part.only(*names)[head] for head in names]
        for k, head in enumerate(each):
            if head.names:
                head.typed("StiefelManifold")
                each[k] = next(iter(head.only("storage" if "storage" in head.names else "A").values()))
        values = [head.reals(2) for head in each]
        dim, heads = dim or values[0].shape[-1], heads or len(values)
        for head, value in zip(each, values, strict=True):
            if len(values) != heads or dim % heads or value.shape != (dim // heads, dim):
                wanted = f"{heads} heads of {dim // heads} x {dim} (in Python's order)"
                raise head.wrong(wanted, f"{len(values)} heads, {' x '.join(map(str, value.shape))}")
        found[role] = torch.stack(values)
    return Layer(name, "heads", dim, found)


def _attention(name: str, part: _Part) -> Layer:
    """The matrix A of an attention: packed, or written out, which its type may call skew."""
    if part.names:
        part.typed("SkewSymMatrix")
        packed, dim = part.packed()
        return Layer(name, "skew", dim, {"packed": packed})
    A = part.square()
    found = Layer(name, "matrix", len(A), {"value": A})
    if part.told != "SkewSymMatrix":
        return found
    skew = found.as_a("skew")
    if skew is None:
        raise part.wrong("a skew-symmetric matrix, as its type says", "another")
    return skew


def _listed(names: Collection[str]) -> str:
    """Some names, not all of many."""
    told = list(names)
    return ", ".join(told[:8]) + (f", … ({len(told)} in all)" if len(told) > 8 else "") or "nothing"

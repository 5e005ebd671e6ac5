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
from bnet_transformer.models.volume_preserving import list_triangular_steps, volume_preserving
from bnet_transformer.tpm import TPM
from bnet_transformer.tpm.volume_preserving import packed_size

TRIANGLE_SIDES = {"LowerTriangular": "lower", "UpperTriangular": "upper"}
LAYER_DESCRIPTIONS: dict[str, str] = {
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
        return _build_standard(where, layers, add, activation, observe)
    if first.kind == "dense" and first.convert_to("lower") is None:
        wanted = "attention (PQ, PK, PV or A) or a triangular layer first"
        raise FileError(f"{where}: L1", expected=wanted, actual="a dense layer, as a net that widens its words has it")
    if add:
        raise BNetError("add", expected="False, for the file has no standard transformer", actual=add)
    return _build_volume_preserving(where, layers, attention, activation, observe)


def _build_standard(path: Path, layers: Sequence[FileLayer], add: bool, activation: str, observe: TPM | None) -> BNet:
    """Units of heads, `n_blocks` ResNet layers and one more."""
    units = _split_units(path, layers, ("heads",))
    blocks = len(units[0]) - 2
    if blocks < 1:
        raise FileError(f"{path}: L1", expected="at least two ResNet layers after attention", actual=blocks + 1)
    heads = len(layers[0].tensors["q"])
    found: dict[str, Tensor] = {}
    for t, (attention, *rest) in enumerate(units):
        _check_layers(path, rest, ["dense"] * len(rest), [True] * len(rest))
        if len(attention.tensors["q"]) != heads:
            got = len(attention.tensors["q"])
            raise FileError(f"{path}: {attention.name}", expected=f"{heads} heads, as L1", actual=got)
        found |= {f"W_{role}_{t}.value": value for role, value in attention.tensors.items()}
        for owner, part in ((f"resnet_{t}", rest[:-1]), (f"x_{t + 1}", rest[-1:])):
            for name in ("weight", "bias"):
                found[f"{owner}.{name}"] = torch.stack([layer.tensors[name] for layer in part])
    net = geometric(
        layers[0].dim, slices=len(units), blocks=blocks, heads=heads, add=add, activation=activation, observe=observe
    )
    return net.to(next(iter(found.values())).dtype).replace(found)


def _build_volume_preserving(
    path: Path, layers: Sequence[FileLayer], attention: str | None, activation: str, observe: TPM | None
) -> BNet:
    """Units of attention, where there is one, and triangular layers; without attention all of them are one unit."""
    attends = layers[0].kind in ("matrix", "skew")
    units = _split_units(path, layers, ("matrix", "skew")) if attends else [list(layers)]
    form = None
    if attends:  # of all units: what is told, else skew where one of them says so
        skew = next((unit[0] for unit in units if unit[0].kind == "skew"), None)
        if skew is not None and attention == "arbitrary":
            raise FileError(
                f"{path}: {skew.name}",
                expected=LAYER_DESCRIPTIONS["matrix"] + ", as is told",
                actual=LAYER_DESCRIPTIONS["skew"],
            )
        form = attention or ("arbitrary" if skew is None else "skew")
    many = len(units[0]) - attends
    blocks, left = divmod(many - 2, 4)
    if left or blocks < 1:
        raise FileError(str(path), expected="4 n_blocks + 2 triangular layers in a unit", actual=f"{many} layers")
    order = list_triangular_steps(blocks, activation)
    net = volume_preserving(
        layers[0].dim, slices=len(units), blocks=blocks, attention=form, activation=activation, observe=observe
    )
    found: dict[str, Tensor] = {}
    for t, unit in enumerate(units):
        if attends:
            A = _convert_layer(path, unit[0], "skew" if form == "skew" else "matrix")
            found |= {f"A_{t}.{name}": value for name, value in A.tensors.items()}
        rest = _check_layers(path, unit[attends:], [side for side, _, _ in order], [bias for _, _, bias in order])
        for k, layer in enumerate(rest):
            owner = f"x_{t + 1}" if k + 1 == len(rest) else f"{order[k][0]}{k // 2 + 1}_{t}"
            found |= {f"{owner}.{name}": value for name, value in layer.tensors.items()}
    return net.to(next(iter(found.values())).dtype).replace(found)


def _split_units(path: Path, layers: Sequence[FileLayer], attention_kinds: Sequence[str]) -> list[list[FileLayer]]:
    """The layers from each attention on, as many in each unit."""
    units: list[list[FileLayer]] = []
    for layer in layers:
        if layer.kind in attention_kinds:
            units.append([])
        units[-1].append(layer)
    for unit in units:
        if len(unit) != len(units[0]):
            wanted = f"{len(units[0]) - 1} layers after attention, as after L1"
            raise FileError(f"{path}: {unit[0].name}", expected=wanted, actual=len(unit) - 1)
    return units


def _convert_layer(path: Path, layer: FileLayer, kind: str) -> FileLayer:
    """A layer as one of that kind; a triangular one that does not say its side has the one that is due."""
    found = layer.convert_to(kind)
    if found is None:
        raise FileError(
            f"{path}: {layer.name}", expected=LAYER_DESCRIPTIONS[kind], actual=LAYER_DESCRIPTIONS[layer.kind]
        )
    return found


def _check_layers(
    path: Path, layers: Sequence[FileLayer], kinds: Sequence[str], biases: Sequence[bool]
) -> list[FileLayer]:
    """Layers as those of these kinds, with a bias or without."""
    found = [_convert_layer(path, layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
    for layer, bias in zip(found, biases, strict=True):
        if ("bias" in layer.tensors) != bias:
            wanted = "a bias" if bias else "no bias (the first layer of a linear pair)"
            raise FileError(f"{path}: {layer.name}", expected=wanted, actual="none" if bias else "one")
    return found


# the layers of a file


@dataclass(frozen=True)
class FileLayer:
    """One layer: what it is, its width, its tensors under our names.

    `kind` is `heads` (q, k, v: `[head, d / heads, d]`), `matrix` or `skew` (an attention's A, whole or packed),
    `dense` (weight, bias), `lower`, `upper`, or `triangular` where the file does not say which (packed, bias).
    """

    name: str
    kind: str
    dim: int
    tensors: Mapping[str, Tensor]

    def convert_to(self, kind: str) -> FileLayer | None:
        """The same as a layer of that kind, its matrix packed where it was written out; None where it is none."""
        if self.kind == kind or (self.kind == "triangular" and kind in TRIANGLE_SIDES.values()):
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
        return FileLayer(self.name, kind, self.dim, {"packed": W[row, column], **rest})


def file_to_layers(path: Path) -> list[FileLayer]:
    """The layers of a file in their order, of one width and one floating type; what is wrong with it is a FileError."""
    try:
        import h5py
    except ImportError as error:
        allowed = 'pip install "bnet-transformer[hdf5]"'
        raise BNetError("load_geometric", expected="the package h5py", actual="none", allowed=allowed) from error
    try:
        if not path.is_file():
            raise FileError(str(path), expected="a file", actual="a folder" if path.is_dir() else "nothing there")
        if not h5py.is_hdf5(path):
            raise FileError(str(path), expected="an HDF5 file", actual="another format")
        with h5py.File(path, "r") as file:
            return _read_layers(path, _HDF5Node(path, file))
    except BNetError:
        raise
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, MemoryError) as error:  # as h5py tells faults
        raise FileError(str(path), expected="a sound HDF5 file", actual=str(error)) from error


def _read_layers(path: Path, root: _HDF5Node) -> list[FileLayer]:
    """The layers of an open file."""
    names = [f"L{k + 1}" for k in range(len(root.names))]
    missing = [name for name in names if name not in root.names]
    if not names or missing:
        got = f"no {missing[0]}, but {_format_names(root.names)}" if names else "nothing in it"
        raise FileError(str(path), expected="groups L1, L2, ... without a gap, and no others", actual=got)
    parts = root.get_children(*names)
    layers = [_read_layer(name, parts[name]) for name in names]
    for layer in layers:
        if layer.dim != layers[0].dim:
            raise FileError(f"{path}: {layer.name}", expected=f"the width {layers[0].dim}, as L1", actual=layer.dim)
    dtypes = {f"{layer.name}/{name}": value.dtype for layer in layers for name, value in layer.tensors.items()}
    first = next(iter(dtypes))
    for name, dtype in dtypes.items():
        if dtype != dtypes[first]:
            raise FileError(f"{path}: {name}", expected=f"{dtypes[first]}, as {first}", actual=dtype)
    return layers


@dataclass(frozen=True)
class _HDF5Node:
    """A group or a dataset of an open file."""

    path: Path
    node: Any

    @property
    def names(self) -> list[str]:
        """The names of the parts of a group; a dataset has none."""
        return list(self.node) if hasattr(self.node, "keys") else []

    @property
    def structure_type(self) -> str:
        """The type that its attributes tell, "" for none."""
        told = next((self.node.attrs[name] for name in ("gml_type", "parameter_type") if name in self.node.attrs), "")
        return (told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told)).rpartition(".")[2]

    def make_error(self, expected: str, received: object) -> FileError:
        """The error of a part that is not what is expected."""
        return FileError(f"{self.path}: {self.node.name.lstrip('/')}", expected=expected, actual=received)

    def get_children(self, *names: str, optional: Collection[str] = ()) -> dict[str, _HDF5Node]:
        """The parts of a group, which holds no more than these, nor less, and itself: no link is followed."""
        if not hasattr(self.node, "keys"):
            raise self.make_error("a group", f"a dataset of shape {self.node.shape}")
        if set(self.names) - set(names) or set(names) - set(optional) - set(self.names):
            raise self.make_error(_format_names(names), _format_names(self.names))
        for name in self.names:
            if type(self.node.get(name, getlink=True)).__name__ != "HardLink":
                raise FileError(
                    f"{self.path}: {f'{self.node.name}/{name}'.strip('/')}",
                    expected="a part of the file itself",
                    actual="a link",
                )
        return {name: _HDF5Node(self.path, self.node[name]) for name in self.names}

    def check_type(self, *kinds: str) -> str:
        """The type that a structured matrix tells, one of these or ""."""
        if self.structure_type not in ("", *kinds):
            raise self.make_error(" or ".join(kinds), self.structure_type)
        return self.structure_type

    def check_not_external(self) -> None:
        """Refuse numbers that lie in another file, which might be a pipe, or a stranger's."""
        if self.node.external or self.node.is_virtual:
            raise self.make_error("numbers in the file itself", "numbers that lie in another file")

    def read_array(self, rank: int) -> Tensor:
        """Real numbers of so many dims."""
        if not hasattr(self.node, "shape"):
            raise self.make_error("a dataset", f"a group of {_format_names(self.names)}")
        self.check_not_external()
        check_memory(self.node.name, self.node.nbytes, "a smaller net")
        found = np.asarray(self.node[()])
        if found.ndim != rank or not found.size:
            raise self.make_error(f"an array of {rank} dims with something in it", f"shape {found.shape}")
        if found.dtype.kind != "f" or found.dtype.itemsize > 8:
            raise self.make_error("real numbers", str(found.dtype))
        if not np.isfinite(found).all():
            raise self.make_error("finite numbers", "some that are not")
        return torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("="), order="C"))

    def read_vector(self, size: int) -> Tensor:
        """Real numbers, as many as they must be."""
        found = self.read_array(1)
        if len(found) != size:
            raise self.make_error(f"a vector of {size}", f"shape {tuple(found.shape)}")
        return found

    def read_square(self) -> Tensor:
        """A square matrix, turned back."""
        found = self.read_array(2)
        if found.shape[0] != found.shape[1]:
            raise self.make_error("a square matrix", tuple(found.shape))
        return found.mT.contiguous()

    def read_packed(self) -> tuple[Tensor, int]:
        """The free entries of a structured matrix, and its width."""
        if "storage" in self.names:
            parts = self.get_children("storage", "metadata")
            entries, size = parts["storage"], parts["metadata"].get_children("n")["n"]
        else:
            parts = self.get_children("S", "n")
            entries, size = parts["S"], parts["n"]
        if getattr(size.node, "size", 0) != 1 or size.node.dtype.kind not in "iu":
            raise size.make_error("a whole number", "something else")
        size.check_not_external()
        dim = int(np.asarray(size.node[()]).item())
        if dim < 2:
            raise size.make_error("a width of at least 2", dim)
        return entries.read_vector(packed_size(dim)), dim


def _read_layer(name: str, node: _HDF5Node) -> FileLayer:
    """One layer, by what it holds."""
    if {"PQ", "PK", "PV"} & set(node.names):
        return _read_heads(name, node.get_children("PQ", "PK", "PV"))
    if "A" in node.names:
        return _read_attention(name, node.get_children("A")["A"])
    if "weight" not in node.names:
        node.get_children(*node.names)
        raise node.make_error("PQ, PK, PV; A; or weight (and bias)", _format_names(node.names))
    parts = node.get_children("weight", "bias", optional=["bias"])
    weight = parts["weight"]
    if weight.names:
        kind = TRIANGLE_SIDES.get(weight.check_type(*TRIANGLE_SIDES), "triangular")
        packed, dim = weight.read_packed()
        tensors = {"packed": packed}
    else:
        kind, tensors = "dense", {"weight": weight.read_square()}
        dim = len(tensors["weight"])
    return FileLayer(name, kind, dim, tensors | ({"bias": parts["bias"].read_vector(dim)} if "bias" in parts else {}))


def _read_heads(name: str, nodes: Mapping[str, _HDF5Node]) -> FileLayer:
    """Projections of each head: Julia's `P` is `[d, d / heads]`, ours `W = P^T`, which is how it arrives.

    A head is a matrix, plain or on the Stiefel manifold (then a group that holds it).
    """
    found: dict[str, Tensor] = {}
    dim = heads = 0
    for role in "qkv":
        part = nodes[f"P{role.upper()}"]
        names = [f"head_{k + 1}" for k in range(max(1, len(part.names)))]
        each = [part.get_children(*names)[head] for head in names]
        for k, head in enumerate(each):
            if head.names:
                head.check_type("StiefelManifold")
                each[k] = next(iter(head.get_children("storage" if "storage" in head.names else "A").values()))
        values = [head.read_array(2) for head in each]
        dim, heads = dim or values[0].shape[-1], heads or len(values)
        for head, value in zip(each, values, strict=True):
            if len(values) != heads or dim % heads or value.shape != (dim // heads, dim):
                wanted = f"{heads} heads of {dim // heads} x {dim} (in Python's order)"
                raise head.make_error(wanted, f"{len(values)} heads, {' x '.join(map(str, value.shape))}")
        found[role] = torch.stack(values)
    return FileLayer(name, "heads", dim, found)


def _read_attention(name: str, node: _HDF5Node) -> FileLayer:
    """The matrix A of an attention: packed, or written out, which its type may call skew."""
    if node.names:
        node.check_type("SkewSymMatrix")
        packed, dim = node.read_packed()
        return FileLayer(name, "skew", dim, {"packed": packed})
    A = node.read_square()
    found = FileLayer(name, "matrix", len(A), {"value": A})
    if node.structure_type != "SkewSymMatrix":
        return found
    skew = found.convert_to("skew")
    if skew is None:
        raise node.make_error("a skew-symmetric matrix, as its type says", "another")
    return skew


def _format_names(names: Collection[str]) -> str:
    """Some names, not all of many."""
    told = list(names)
    return ", ".join(told[:8]) + (f", … ({len(told)} in all)" if len(told) > 8 else "") or "nothing"

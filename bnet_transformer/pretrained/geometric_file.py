"""The parameter files of the Julia package GeometricMachineLearning.jl, as nets: `load_geometric`.

Such a file (HDF5) has a group for each layer, `L1`, `L2`, ..., and says nothing of the architecture: it follows from
what the layers hold. Julia counts columns first, so a matrix arrives transposed; structured ones are groups with their
free entries, `S` and `n` (or `storage` and `metadata/n`, as later versions write them). A file comes from others: links
that lead out of it are not followed, and nothing is read before its shape is known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.bnet import BNet
from bnet_transformer.errors import BNetError, FileError, one_of, room_for
from bnet_transformer.files.atomic import as_path
from bnet_transformer.models.geometric import geometric
from bnet_transformer.models.volume_preserving import steps, volume_preserving
from bnet_transformer.tpm import TPM
from bnet_transformer.tpm.geometric import packed_size

MOST = 2**26
"""As many numbers as one dataset may hold."""
TIMES = 2**10
"""As many bytes as one of the file may become: a short file can tell of arrays that nobody wrote, or of one often."""
WIDEST = 2**13
"""As wide as a matrix of so many numbers is."""

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
    form = _form_of(where, [unit.attention for unit in units if unit.attention is not None], told) if attends else None
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


def _form_of(where: Path, attention: Sequence[Layer], told: str | None) -> str:
    """The form of the attention of all units: what is told, else skew where one of them says so."""
    skew = next((layer for layer in attention if layer.kind == "skew"), None)
    if skew is not None and told == "arbitrary":
        raise FileError(f"{where}: {skew.name}", expected=TOLD["matrix"] + ", as is told", got=TOLD["skew"])
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
        raise FileError(f"{where}: {layer.name}", expected=TOLD[kind], got=TOLD[layer.kind])
    return found


def _check(where: Path, layers: Sequence[Layer], kinds: Sequence[str], biases: Sequence[bool]) -> list[Layer]:
    """Layers as those of these kinds, with a bias or without."""
    found = [_as_a(where, layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
    for layer, bias in zip(found, biases, strict=True):
        if ("bias" in layer.tensors) != bias:
            wanted = "a bias" if bias else "no bias (the first layer of a linear pair)"
            raise FileError(f"{where}: {layer.name}", expected=wanted, got="none" if bias else "one")
    return found


def _with(net: BNet, found: dict[str, Tensor]) -> BNet:
    """The net with the file's parameters, in the file's floating type."""
    dtype = next(iter(found.values())).dtype
    return net.to(dtype).replace(found)


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
    """The layers of a file in their order, of one width and one floating type."""
    with _opened(where) as file:
        reader = _Reader(where)
        layers = [reader.layer(name, reader.member(file, name)) for name in reader.names(file)]
    dtypes = {f"{layer.name}/{name}": value.dtype for layer in layers for name, value in layer.tensors.items()}
    first = layers[0]
    for layer in layers:
        if layer.dim != first.dim:
            raise FileError(f"{where}: {layer.name}", expected=f"the width {first.dim}, as L1", got=layer.dim)
    for name, dtype in dtypes.items():
        if dtype != next(iter(dtypes.values())):
            wanted = f"{next(iter(dtypes.values()))}, as {next(iter(dtypes))}"
            raise FileError(f"{where}: {name}", expected=wanted, got=dtype)
    return layers


@contextlib.contextmanager
def _opened(where: Path) -> Iterator[Any]:
    """The file, open for reading; whatever is wrong with it is a FileError."""
    h5py = _h5py()
    try:
        if not where.is_file():
            raise FileError(str(where), expected="a file", got="a folder" if where.is_dir() else "nothing there")
        if not h5py.is_hdf5(where):
            raise FileError(str(where), expected="an HDF5 file", got="another format")
        with h5py.File(where, "r") as file:
            yield file
    except BNetError:
        raise
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, MemoryError) as error:  # as h5py tells faults
        raise FileError(str(where), expected="a sound HDF5 file", got=str(error)) from error


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        allowed = 'pip install "bnet-transformer[hdf5]"'
        raise BNetError("load_geometric", expected="the package h5py", got="none", allowed=allowed) from error
    found: ModuleType = h5py
    return found


@dataclass(frozen=True)
class _Reader:
    """Reads the parts of one file, with errors that name the place."""

    where: Path
    taken: list[int] = field(default_factory=list)  # the bytes of each dataset that was read

    def names(self, file: Any) -> list[str]:
        """`L1, L2, ...` without a gap, and nothing else."""
        found = set(file)
        names = [f"L{k + 1}" for k in range(len(found))]
        missing = [name for name in names if name not in found]
        if not found or missing:
            got = f"no {missing[0]}, but {_listed(sorted(found))}" if found else "nothing in it"
            raise FileError(str(self.where), expected="groups L1, L2, ... without a gap, and no others", got=got)
        return names

    def member(self, group: Any, name: str) -> Any:
        """What a group holds under a name, in this file and nowhere else."""
        h5py = _h5py()
        place = f"{group.name.rstrip('/')}/{name}"
        if name not in group:
            raise self._wrong(place, "something there", f"nothing beside {_listed(sorted(group))}")
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise self._wrong(place, "a part of the file itself", "a link")
        found = group[name]
        if not isinstance(found, h5py.Group | h5py.Dataset):
            raise self._wrong(place, "a group or a dataset", "a type")
        if isinstance(found, h5py.Dataset) and (found.external or found.is_virtual):
            raise self._wrong(place, "numbers in the file itself", "numbers that lie in another file")
        return found

    def layer(self, name: str, group: Any) -> Layer:
        """One layer, by what it holds."""
        keys = self._keys(group)
        if {"PQ", "PK", "PV"} & keys:
            self._only(group, keys, ("PQ", "PK", "PV"))
            return self._heads(name, group)
        if "A" in keys:
            self._only(group, keys, ("A",))
            return self._attention(name, self.member(group, "A"))
        if "weight" in keys:
            self._only(group, keys, ("weight", "bias"), optional=("bias",))
            return self._step(name, group, "bias" in keys)
        wanted = "PQ, PK, PV; A; or weight (and bias)"
        raise self._wrong(group.name, wanted, _listed(sorted(keys)) or "nothing")

    def _heads(self, name: str, group: Any) -> Layer:
        """Projections of each head: Julia's `P` is `[d, d / heads]`, ours `W = P^T`, which is how it arrives."""
        parts = {role: self._each_head(self.member(group, f"P{role.upper()}")) for role in "qkv"}
        width = parts["q"][0].shape[-1]
        heads = len(parts["q"])
        for role, found in parts.items():
            for k, value in enumerate(found):
                if len(found) != heads or width % heads or value.shape != (width // heads, width):
                    place = f"{group.name}/P{role.upper()}/head_{k + 1}"
                    wanted = f"{heads} heads of {width // heads} x {width} (in Python's order)"
                    raise self._wrong(place, wanted, f"{len(found)} heads, {_form(value)}")
        return Layer(name, "heads", width, {role: torch.stack(found) for role, found in parts.items()})

    def _each_head(self, group: Any) -> list[Tensor]:
        names = [f"head_{k + 1}" for k in range(len(self._keys(group)))]
        self._only(group, self._keys(group), names or ["head_1"])
        return [self._projection(self.member(group, name)) for name in names]

    def _projection(self, node: Any) -> Tensor:
        """A matrix, plain or on the Stiefel manifold (then a group that holds it)."""
        if self._is_group(node):
            self._type(node, "StiefelManifold")
            node = self.member(node, "storage" if "storage" in node else "A")
        return self._read(node, 2)

    def _attention(self, name: str, node: Any) -> Layer:
        if self._is_group(node):
            self._type(node, "SkewSymMatrix")
            packed, dim = self._packed(node)
            return Layer(name, "skew", dim, {"packed": packed})
        A = self._square(node)
        found = Layer(name, "matrix", len(A), {"value": A})
        if self._told(node) != "SkewSymMatrix":
            return found
        skew = found.as_a("skew")
        if skew is None:
            raise self._wrong(node.name, "a skew-symmetric matrix, as its type says", "another")
        return skew

    def _step(self, name: str, group: Any, has_bias: bool) -> Layer:
        """A dense or a triangular layer."""
        node = self.member(group, "weight")
        if self._is_group(node):
            kind = SIDES.get(self._type(node, *SIDES), "triangular")
            weight, dim = self._packed(node)
            tensors = {"packed": weight}
        else:
            weight = self._square(node)
            kind, dim, tensors = "dense", len(weight), {"weight": weight}
        if has_bias:
            tensors["bias"] = self._vector(self.member(group, "bias"), dim)
        return Layer(name, kind, dim, tensors)

    def _packed(self, group: Any) -> tuple[Tensor, int]:
        """The free entries of a structured matrix, and its width."""
        keys = self._keys(group)
        if "storage" in keys:
            self._only(group, keys, ("storage", "metadata"))
            entries, size = self.member(group, "storage"), self.member(self.member(group, "metadata"), "n")
        else:
            self._only(group, keys, ("S", "n"))
            entries, size = self.member(group, "S"), self.member(group, "n")
        if self._is_group(size) or size.size != 1 or size.dtype.kind not in "iu":
            raise self._wrong(size.name, "a whole number", "something else")
        dim = int(size[()].item()) if size.shape else int(size[()])
        if not 2 <= dim <= WIDEST:
            raise self._wrong(size.name, f"a width from 2 to {WIDEST}", dim)
        return self._vector(entries, packed_size(dim)), dim

    def _square(self, node: Any) -> Tensor:
        """A square matrix, turned back."""
        found = self._read(node, 2)
        if found.shape[0] != found.shape[1]:
            raise self._wrong(node.name, "a square matrix", _form(found))
        return found.mT.contiguous()

    def _vector(self, node: Any, size: int) -> Tensor:
        if not self._is_group(node) and node.shape != (size,):
            raise self._wrong(node.name, f"a vector of {size}", f"shape {node.shape}")
        return self._read(node, 1)

    def _read(self, node: Any, rank: int) -> Tensor:
        """The numbers of a dataset of real numbers."""
        if self._is_group(node):
            raise self._wrong(node.name, "a dataset", f"a group of {_listed(sorted(node)) or 'nothing'}")
        if node.shape is None or len(node.shape) != rank or not 0 < node.size <= MOST:
            raise self._wrong(node.name, f"an array of {rank} dims with something in it", f"shape {node.shape}")
        if node.dtype.kind != "f" or node.dtype.itemsize > 8:
            raise self._wrong(node.name, "real numbers", str(node.dtype))
        self.taken.append(node.nbytes)
        most = TIMES * self.where.stat().st_size
        if sum(self.taken) > most:
            raise self._wrong(node.name, f"at most {TIMES} times the bytes of the file", f"{sum(self.taken):,} bytes")
        room_for(f"{self.where}: {node.name.lstrip('/')}", sum(self.taken), "a smaller net")
        found = np.asarray(node[()])
        if not np.isfinite(found).all():
            raise self._wrong(node.name, "finite numbers", "some that are not")
        return torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("="), order="C"))

    def _type(self, group: Any, *allowed: str) -> str:
        """What a structured matrix says that it is, "" where it says nothing."""
        told = self._told(group)
        if told not in ("", *allowed):
            raise self._wrong(group.name, " or ".join(allowed), told)
        return told

    @staticmethod
    def _told(node: Any) -> str:
        """The type that the attributes of a matrix say, "" where there is none."""
        for attribute in ("gml_type", "parameter_type"):
            if attribute in node.attrs:
                told = node.attrs[attribute]
                told = told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told)
                return told.rpartition(".")[2]
        return ""

    def _keys(self, group: Any) -> set[str]:
        if not self._is_group(group):
            raise self._wrong(group.name, "a group", f"a dataset of shape {group.shape}")
        return set(group)

    def _only(self, group: Any, keys: Collection[str], wanted: Sequence[str], optional: Sequence[str] = ()) -> None:
        """Refuse a group that holds more than this, or less."""
        odd = sorted(set(keys) - set(wanted)) or sorted(set(wanted) - set(optional) - set(keys))
        if odd:
            raise self._wrong(group.name, _listed(wanted), _listed(sorted(keys)) or "nothing")

    def _wrong(self, place: str, expected: str, got: object) -> FileError:
        return FileError(f"{self.where}: {place.lstrip('/')}", expected=expected, got=got)

    @staticmethod
    def _is_group(node: Any) -> bool:
        return isinstance(node, _h5py().Group)


def _listed(names: Collection[str]) -> str:
    """Some names, not all of many."""
    told = list(names)
    return ", ".join(told[:8]) + (f", … ({len(told)} in all)" if len(told) > 8 else "")


def _form(value: Tensor) -> str:
    return " x ".join(map(str, value.shape))

"""HDF5 to layers: what the groups `L1`, `L2`, ... of a GeometricMachineLearning.jl file hold, checked and in our order.

A file comes from others: links that lead out of it are not followed, and nothing is read before its shape is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, FileError, room_for
from bnet_transformer.tpm.geometric import packed_size

MOST = 2**26
"""As many numbers as one dataset may hold."""
TIMES = 2**10
"""As many bytes as one of the file may become: a short file can tell of arrays that nobody wrote, or of one often."""
WIDEST = 2**13
"""As wide as a matrix of so many numbers is."""

SIDES = {"LowerTriangular": "lower", "UpperTriangular": "upper"}


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
    dtypes = {name: value.dtype for layer in layers for name, value in _named(layer)}
    first = layers[0]
    for layer in layers:
        if layer.dim != first.dim:
            raise FileError(f"{where}: {layer.name}", expected=f"the width {first.dim}, as L1", got=layer.dim)
    for name, dtype in dtypes.items():
        if dtype != next(iter(dtypes.values())):
            wanted = f"{next(iter(dtypes.values()))}, as {next(iter(dtypes))}"
            raise FileError(f"{where}: {name}", expected=wanted, got=dtype)
    return layers


def _named(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    for name, value in layer.tensors.items():
        yield f"{layer.name}/{name}", value


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

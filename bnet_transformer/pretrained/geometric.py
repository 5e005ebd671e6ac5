"""The parameter files of the Julia package GeometricMachineLearning.jl, as nets: `load_geometric`.

Such an HDF5 file has one group for each layer, `L1`, `L2`, ..., and no architecture, which is inferred from the layers.
Julia stores matrices in column-major order, so they are read transposed. A structured matrix is a group with its free
entries and its width: `S` and `n`, or `storage` and `metadata/n` in later versions.

A file is untrusted input, and HDF5 can declare more numbers than a file contains: by fill values, compression, links,
or data elsewhere. So the layers are read twice: first as declared, as tensors on the device "meta", which have shape
and dtype but no memory, and then with numbers. The first pass checks each dataset and the architecture, and that the
numbers of all layers together are not larger than the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.files import as_path
from bnet_transformer.bnet import BNet
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.models.geometric import geometric, list_triangular_steps, volume_preserving
from bnet_transformer.tpm import TPM
from bnet_transformer.tpm.volume_preserving import packed_size

TRIANGLE_SIDES = {"LowerTriangular": "lower", "UpperTriangular": "upper"}
MAX_ATTRIBUTE_BYTES = 1024
H5PY_ERRORS = (OSError, LookupError, RuntimeError, TypeError, ValueError, MemoryError)
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
    """Load the net of a parameter file of GeometricMachineLearning.jl. It requires h5py (the extra `hdf5`).

    Architecture, dim, heads, slices (L) and blocks (n_blocks) are inferred from the layers.

    Args:
        path: The path of the file.
        attention: `"skew"` or `"arbitrary"`, the form of a volume-preserving attention whose matrix A is not packed. By
            default skew if A is packed or its type is skew-symmetric, else arbitrary.
        add: True if a standard transformer adds its words to the attention (`add_connection`), which the file does not
            contain.
        activation: The activation, which the file does not contain.
        observe: A readout, as in `bt.geometric`; None for none.

    Returns:
        The net.

    Raises:
        FileError: If the file is not such a file, or its layers match no architecture.
    """
    path = as_path(path)
    check_choice("add", add, (True, False))
    check_choice("attention", attention, (None, "skew", "arbitrary"))
    options = {"activation": activation, "observe": observe}
    build, parameters = _read_file(path, lambda layers: _plan_net(path, layers, attention, add, options))
    return build().to(next(iter(parameters.values())).dtype).replace(parameters)


# a net by the function that builds it, and its parameters: an architecture with the options of the caller
NetPlan = tuple[Callable[[], BNet], dict[str, Tensor]]
Options = Mapping[str, Any]


def _plan_net(path: Path, layers: Sequence[FileLayer], attention: str | None, add: bool, options: Options) -> NetPlan:
    """Find the architecture of the layers, which is checked before the net is built."""
    first = layers[0]
    if first.kind not in ("matrix", "skew") and attention is not None:
        expected = "None, because the file has no volume-preserving attention"
        raise BNetError("attention", expected=expected, actual=attention)
    if first.kind == "heads":
        return _plan_standard(layers, add, options)
    if first.kind == "dense" and first.convert_to("lower") is None:
        expected = "attention (PQ, PK, PV or A) or a triangular layer first"
        actual = "a dense layer, which occurs in nets that widen their words"
        raise FileError(first.subject, expected=expected, actual=actual)
    if add:
        raise BNetError("add", expected="False, because the file has no standard transformer", actual=add)
    return _plan_volume_preserving(path, layers, attention, options)


def _plan_standard(layers: Sequence[FileLayer], add: bool, options: Options) -> NetPlan:
    """Plan the net of a standard transformer: units of attention heads and `n_blocks` + 1 ResNet layers."""
    units = _split_units(layers, ("heads",))
    blocks = len(units[0]) - 2
    if blocks < 1:
        raise FileError(layers[0].subject, expected="at least two ResNet layers after attention", actual=blocks + 1)
    heads = len(layers[0].tensors["q"])
    parameters: dict[str, Tensor] = {}
    for t, (attention, *resnet) in enumerate(units):
        _check_layers(resnet, ["dense"] * len(resnet), [True] * len(resnet))
        if (actual := len(attention.tensors["q"])) != heads:
            raise FileError(attention.subject, expected=f"{heads} heads, as in L1", actual=actual)
        parameters |= {f"W_{role}_{t}.value": value for role, value in attention.tensors.items()}
        for owner, part in ((f"resnet_{t}", resnet[:-1]), (f"x_{t + 1}", resnet[-1:])):
            for name in ("weight", "bias"):
                parameters[f"{owner}.{name}"] = torch.stack([layer.tensors[name] for layer in part])
    dim, slices = layers[0].dim, len(units)
    return partial(geometric, dim, slices=slices, blocks=blocks, heads=heads, add=add, **options), parameters


def _plan_volume_preserving(
    path: Path, layers: Sequence[FileLayer], attention: str | None, options: Options
) -> NetPlan:
    """Plan the net of a volume-preserving transformer: units of attention, if there is any, and triangular layers.

    Without attention, all layers are one unit.
    """
    has_attention = layers[0].kind in ("matrix", "skew")
    units = _split_units(layers, ("matrix", "skew")) if has_attention else [list(layers)]
    form = None
    if has_attention:  # one form for all units: skew if any of them is skew
        skew = next((unit[0] for unit in units if unit[0].kind == "skew"), None)
        if skew is not None and attention == "arbitrary":
            expected = LAYER_DESCRIPTIONS["matrix"] + ", because attention='arbitrary'"
            raise FileError(skew.subject, expected=expected, actual=LAYER_DESCRIPTIONS["skew"])
        form = attention or ("arbitrary" if skew is None else "skew")
    count = len(units[0]) - has_attention
    blocks, remainder = divmod(count - 2, 4)
    if remainder or blocks < 1:
        raise FileError(str(path), expected="4 n_blocks + 2 triangular layers in a unit", actual=f"{count} layers")
    steps = list_triangular_steps(blocks, options["activation"])
    dim, slices = layers[0].dim, len(units)
    parameters: dict[str, Tensor] = {}
    for t, unit in enumerate(units):
        if has_attention:
            A = _convert_layer(unit[0], "skew" if form == "skew" else "matrix")
            parameters |= {f"A_{t}.{name}": value for name, value in A.tensors.items()}
        sides, biases = [side for side, _, _ in steps], [bias for _, _, bias in steps]
        for k, layer in enumerate(_check_layers(unit[has_attention:], sides, biases)):
            owner = f"x_{t + 1}" if k + 1 == count else f"{sides[k]}{k // 2 + 1}_{t}"
            parameters |= {f"{owner}.{name}": value for name, value in layer.tensors.items()}
    return partial(volume_preserving, dim, slices=slices, blocks=blocks, attention=form, **options), parameters


def _split_units(layers: Sequence[FileLayer], attention_kinds: Sequence[str]) -> list[list[FileLayer]]:
    """Split the layers into units, which start with attention; all units have the same number of layers."""
    units: list[list[FileLayer]] = []
    for layer in layers:
        if layer.kind in attention_kinds:
            units.append([])
        units[-1].append(layer)
    for unit in units:
        if len(unit) != len(units[0]):
            expected = f"{len(units[0]) - 1} layers after attention, as after L1"
            raise FileError(unit[0].subject, expected=expected, actual=len(unit) - 1)
    return units


def _convert_layer(layer: FileLayer, kind: str) -> FileLayer:
    """Convert a layer to another kind; raise an error if it has another structure."""
    converted = layer.convert_to(kind)
    if converted is None:
        expected, actual = LAYER_DESCRIPTIONS[kind], LAYER_DESCRIPTIONS[layer.kind]
        raise FileError(layer.subject, expected=expected, actual=actual)
    return converted


def _check_layers(layers: Sequence[FileLayer], kinds: Sequence[str], biases: Sequence[bool]) -> list[FileLayer]:
    """Convert layers to some kinds, and check that they have a bias or not."""
    converted = [_convert_layer(layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
    for layer, bias in zip(converted, biases, strict=True):
        if ("bias" in layer.tensors) != bias:
            expected = "a bias; it is missing" if bias else "no bias, because it is the first layer of a linear pair"
            raise FileError(layer.subject, expected=expected)
    return converted


# the layers of a file


@dataclass(frozen=True)
class FileLayer:
    """One layer of a file.

    Args:
        subject: Its file and the name of its group, such as L1, for error messages.
        kind: `"heads"` (tensors q, k, v: `[head, d / heads, d]`), `"matrix"` or `"skew"` (the A of an attention, full
            or packed), `"dense"` (weight, bias), `"lower"`, `"upper"`, or `"triangular"` if the file does not contain
            the side (packed, bias).
        dim: The width of the layer.
        tensors: The tensors of the layer.
    """

    subject: str
    kind: str
    dim: int
    tensors: Mapping[str, Tensor]

    def convert_to(self, kind: str) -> FileLayer | None:
        """Convert the layer to another kind, with a full matrix packed; None if its matrix has another structure."""
        if self.kind == kind or (self.kind == "triangular" and kind in TRIANGLE_SIDES.values()):
            return self
        name = {"skew": "value", "lower": "weight", "upper": "weight"}.get(kind, "")
        if name not in self.tensors:
            return None
        W = self.tensors[name].mT if kind == "upper" else self.tensors[name]
        S = W.tril(-1)
        if not W.is_meta and not torch.equal(W, S - S.mT if kind == "skew" else S):
            return None
        row, column = torch.tril_indices(self.dim, self.dim, -1, device=W.device)
        tensors = {key: value for key, value in self.tensors.items() if key != name}
        return FileLayer(self.subject, kind, self.dim, {"packed": W[row, column], **tensors})


def _read_file(path: Path, plan: Callable[[list[FileLayer]], NetPlan]) -> NetPlan:
    """Plan a net from the layers of a file: first as declared, which checks the plan, and then with their numbers.

    Raises:
        FileError: If the file is damaged, or has groups that are not layers.
    """
    try:
        import h5py
    except ImportError as error:
        hint = 'Run pip install "bnet-transformer[hdf5]"'
        raise BNetError("load_geometric requires the package h5py", hint=hint) from error
    try:
        if not path.is_file():
            raise FileError(str(path), expected="a file", actual="a folder" if path.is_dir() else "no such file")
        if not h5py.is_hdf5(path):
            raise FileError(str(path), expected="an HDF5 file", actual="another format")
        with h5py.File(path, "r") as file:
            root = _HDF5Node(path, file)
            declared = _read_layers(path, root)
            plan(declared)
            size = sum(value.nbytes for layer in declared for value in layer.tensors.values())
            if size > (available := path.stat().st_size):  # layers share their numbers, which are read once for each
                expected = f"at most {available:,} bytes of numbers, the size of the file"
                raise FileError(str(path), expected=expected, actual=f"{size:,} bytes")
            return plan(_read_layers(path, replace(root, has_numbers=True)))
    except BNetError:
        raise
    except H5PY_ERRORS as error:
        raise FileError(str(path), expected="a valid HDF5 file", actual=str(error)) from error


def _read_layers(path: Path, root: _HDF5Node) -> list[FileLayer]:
    """Read the layers of an open file, in their order, all with one width and one floating-point dtype."""
    names = [f"L{k + 1}" for k in range(len(root.names))]
    missing = [name for name in names if name not in root.names]
    if not names or missing:
        actual = f"{_format_names(root.names)}, without {missing[0]}" if names else "an empty file"
        raise FileError(str(path), expected="groups L1, L2, ... without a gap, and no other groups", actual=actual)
    parts = root.get_children(*names)
    layers = [_read_layer(f"{path}: {name}", parts[name]) for name in names]
    for layer in layers:
        if layer.dim != layers[0].dim:
            raise FileError(layer.subject, expected=f"width {layers[0].dim}, as in L1", actual=layer.dim)
    first, expected = next(iter(layers[0].tensors.items()))
    for layer in layers:
        for name, value in layer.tensors.items():
            if value.dtype != expected.dtype:
                known = f"{expected.dtype}, as in L1/{first}"
                raise FileError(f"{layer.subject}/{name}", expected=known, actual=value.dtype)
    return layers


@dataclass(frozen=True)
class _HDF5Node:
    """A group or a dataset of an open file; its tensors have numbers, or are on the device "meta"."""

    path: Path
    node: Any
    has_numbers: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the children of a group; none for a dataset."""
        return list(self.node) if hasattr(self.node, "keys") else []

    @property
    def structure_type(self) -> str:
        """The Julia type in the attributes, without the module; "" if there is none."""
        key = next((key for key in ("gml_type", "parameter_type") if key in self.node.attrs), None)
        return "" if key is None else self._read_attribute(key).rpartition(".")[2]

    def _read_attribute(self, key: str) -> str:
        """Read a string attribute whose numbers of bytes in memory and in the file are equal.

        The length of a variable-length string is a number in the file, for which HDF5 allocates memory before it
        compares it with the stored bytes; the elements of an array of such strings can share their bytes.
        """
        import h5py

        attribute = self.node.attrs.get_id(key)
        is_scalar = attribute.get_space().get_simple_extent_type() == h5py.h5s.SCALAR
        if not is_scalar or attribute.dtype.kind != "S" or attribute.dtype.itemsize > MAX_ATTRIBUTE_BYTES:
            expected = f"one string of a fixed length, at most {MAX_ATTRIBUTE_BYTES} bytes, in the attribute {key}"
            actual = f"{attribute.dtype}, shape {attribute.shape}"
            raise self.make_error(expected, actual, "In Python, write the attribute as np.bytes_(name)")
        name = self.node.attrs[key]
        return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)

    def make_error(self, expected: str, received: object, hint: str = "") -> FileError:
        """Create the error of a node that is not what is expected."""
        return FileError(f"{self.path}: {self.node.name.lstrip('/')}", expected=expected, actual=received, hint=hint)

    def get_children(self, *names: str, optional: Collection[str] = ()) -> dict[str, _HDF5Node]:
        """Return the children of a group by name; raise an error for missing and other names, and for links."""
        import h5py

        if not hasattr(self.node, "keys"):
            raise self.make_error("a group", f"a dataset of shape {self.node.shape}")
        if set(self.names) - set(names) or set(names) - set(optional) - set(self.names):
            raise self.make_error(_format_names(names), _format_names(self.names))
        for name in self.names:
            if type(self.node.get(name, getlink=True)).__name__ != "HardLink":
                subject = f"{self.path}: {f'{self.node.name}/{name}'.strip('/')}"
                raise FileError(subject, expected="data in the file itself", actual="a link")
        children = {name: replace(self, node=self.node[name]) for name in self.names}
        for child in children.values():
            if not isinstance(child.node, h5py.Group | h5py.Dataset):  # HDF5 files also contain named datatypes
                raise child.make_error("a group or a dataset", f"a {type(child.node).__name__.lower()}")
        return children

    def check_type(self, *kinds: str) -> str:
        """Return the Julia type of a structured matrix, which must be one of `kinds` or ""."""
        if self.structure_type not in ("", *kinds):
            raise self.make_error(" or ".join(kinds), self.structure_type)
        return self.structure_type

    def check_stored(self) -> None:
        """Raise an error for numbers that the file does not contain as they are.

        Data in another file could be a pipe or a private file of the user. Fill values and compressed data are larger
        in memory than in the file, without a limit.
        """
        if self.node.external or self.node.is_virtual:
            raise self.make_error("numbers in the file itself", "numbers in another file")
        if self.node.id.get_create_plist().get_nfilters():
            hint = "Convert the file with h5repack -f NONE"
            raise self.make_error("numbers without compression", "an HDF5 filter, such as gzip", hint)
        if (stored := self.node.id.get_storage_size()) < self.node.nbytes:
            expected = f"{self.node.nbytes:,} bytes of numbers for shape {self.node.shape}"
            raise self.make_error(expected, f"{stored:,} bytes in the file")

    def read_array(self, rank: int) -> Tensor:
        """Read the finite floating-point numbers of a dataset with `rank` dims."""
        if not hasattr(self.node, "shape"):
            raise self.make_error("a dataset", f"a group of {_format_names(self.names)}")
        shape, dtype = self.node.shape, self.node.dtype
        if shape is None or len(shape) != rank or 0 in shape:
            raise self.make_error(f"an array of {rank} dims that is not empty", f"shape {shape}")
        if dtype.kind != "f" or dtype.itemsize > 8:
            raise self.make_error("real numbers", str(dtype))
        self.check_stored()
        dtype = dtype.newbyteorder("=")
        if not self.has_numbers:
            return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device="meta")
        array = np.asarray(self.node[()])
        if not np.isfinite(array).all():
            raise self.make_error("finite numbers", "a NaN or infinity")
        return torch.from_numpy(np.array(array, dtype=dtype, order="C"))

    def read_vector(self, size: int) -> Tensor:
        """Read a dataset of shape `[size]`."""
        vector = self.read_array(1)
        if len(vector) != size:
            raise self.make_error(f"a vector of length {size}", f"shape {tuple(vector.shape)}")
        return vector

    def read_square(self) -> Tensor:
        """Read a square matrix, `[d, d]`, and transpose it back to the order of Julia's indices."""
        matrix = self.read_array(2)
        if matrix.shape[0] != matrix.shape[1]:
            raise self.make_error("a square matrix", tuple(matrix.shape))
        return matrix.mT.contiguous()

    def read_packed(self) -> tuple[Tensor, int]:
        """Read the free entries of a structured matrix, `[d (d - 1) / 2]`, and its width d."""
        if "storage" in self.names:
            parts = self.get_children("storage", "metadata")
            entries, size = parts["storage"], parts["metadata"].get_children("n")["n"]
        else:
            parts = self.get_children("S", "n")
            entries, size = parts["S"], parts["n"]
        if getattr(size.node, "size", 0) != 1 or size.node.dtype.kind not in "iu":
            raise size.make_error("one integer", "other data")
        size.check_stored()
        dim = int(np.asarray(size.node[()]).item())
        if dim < 2:
            raise size.make_error("a width of at least 2", dim)
        return entries.read_vector(packed_size(dim)), dim


def _read_layer(subject: str, node: _HDF5Node) -> FileLayer:
    """Read one layer, whose kind is inferred from the names of its children."""
    if {"PQ", "PK", "PV"} & set(node.names):
        return _read_heads(subject, node.get_children("PQ", "PK", "PV"))
    if "A" in node.names:
        return _read_attention(subject, node.get_children("A")["A"])
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
    tensors |= {"bias": parts["bias"].read_vector(dim)} if "bias" in parts else {}
    return FileLayer(subject, kind, dim, tensors)


def _read_heads(subject: str, nodes: Mapping[str, _HDF5Node]) -> FileLayer:
    """Read the projections of each head.

    Julia's `P` is `[d, d / heads]`, and `W = P^T` is the matrix in the order of the file. A head is a matrix, or a
    group with a matrix on the Stiefel manifold.
    """
    tensors: dict[str, Tensor] = {}
    dim = heads = 0
    for role in "qkv":
        group = nodes[f"P{role.upper()}"]
        names = [f"head_{k + 1}" for k in range(max(1, len(group.names)))]
        head_nodes = [group.get_children(*names)[head] for head in names]
        for k, head in enumerate(head_nodes):
            if head.names:
                head.check_type("StiefelManifold")
                head_nodes[k] = next(iter(head.get_children("storage" if "storage" in head.names else "A").values()))
        values = [head.read_array(2) for head in head_nodes]
        dim, heads = dim or values[0].shape[-1], heads or len(values)
        for head, value in zip(head_nodes, values, strict=True):
            if len(values) != heads or dim % heads or value.shape != (dim // heads, dim):
                expected = f"{heads} heads of shape {dim // heads} x {dim} (in Python's order)"
                raise head.make_error(expected, f"{len(values)} heads of shape {' x '.join(map(str, value.shape))}")
        tensors[role] = torch.stack(values)
    return FileLayer(subject, "heads", dim, tensors)


def _read_attention(subject: str, node: _HDF5Node) -> FileLayer:
    """Read the matrix A of an attention: packed, or full; the type of a full matrix may be skew-symmetric."""
    if node.names:
        node.check_type("SkewSymMatrix")
        packed, dim = node.read_packed()
        return FileLayer(subject, "skew", dim, {"packed": packed})
    A = node.read_square()
    layer = FileLayer(subject, "matrix", len(A), {"value": A})
    if node.structure_type != "SkewSymMatrix":
        return layer
    skew = layer.convert_to("skew")
    if skew is None:
        raise node.make_error("a skew-symmetric matrix, according to its type", "a matrix that is not skew-symmetric")
    return skew


def _format_names(names: Collection[str]) -> str:
    """Format the first 8 names, and the number of names."""
    listed = list(names)
    return ", ".join(listed[:8]) + (f", … ({len(listed)} in all)" if len(listed) > 8 else "") or "nothing"

"""`load_geometric`: files as GeometricMachineLearning.jl writes them, in both layouts, against its formulas."""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.tpm import Normal
from tests import numpy_geometric as columns
from tests.test_geometric import run_net

h5py = pytest.importorskip("h5py")

RNG = np.random.default_rng(12)


@dataclass
class Packed:
    """A structured matrix of the Julia package: its free entries, its width, its type."""

    S: np.ndarray
    n: int
    kind: str


@dataclass
class JuliaFile:
    """A parameter file as Julia writes it: arrays in the order of its columns, so transposed for Python."""

    layers: list[dict] = field(default_factory=list)
    style: str = "tagged"  # or "bare" (no types), "plain" (written out), "storage" (later: types, order in attributes)

    def write(self, path: Path) -> Path:
        with h5py.File(path, "w") as file:
            names = [f"L{k + 1}" for k in range(len(self.layers))]
            self._write_keys(file, names, "NetworkParameters")
            for name, layer in zip(names, self.layers, strict=True):
                self._write_group(file.create_group(name), layer)
        return path

    def _write_keys(self, group, names, kind):
        if self.style == "storage":
            group.attrs["kind"], group.attrs["keys"] = kind, list(names)

    def _write_group(self, group, content):
        self._write_keys(group, content, "NamedTuple")
        for name, value in content.items():
            if isinstance(value, dict):
                self._write_group(group.create_group(name), value)
            elif isinstance(value, Packed) and self.style == "plain":
                side = {"LowerTriangular": "lower", "UpperTriangular": "upper"}.get(value.kind, "skew")
                group[name] = columns.unpack(value.S, value.n, side).T
            elif isinstance(value, Packed):
                self._write_packed(group.create_group(name), value)
            else:
                group[name] = np.asarray(value).T

    def _write_packed(self, group, value):
        if self.style == "storage":
            group.attrs["kind"], group.attrs["parameter_type"] = "wrapped", np.bytes_(value.kind)
            group["storage"] = value.S
            self._write_group(group.create_group("metadata"), {"n": np.int64(value.n)})
            return
        group["S"], group["n"] = value.S, np.int64(value.n)
        if self.style == "tagged":
            group.attrs["gml_type"] = np.bytes_(value.kind)  # HDF5.jl writes a string with its length in the type


def normal(*shape, dtype=np.float64):
    return (0.4 * RNG.normal(size=shape)).astype(dtype)


def make_attention(d, heads=1, dtype=np.float64):
    """`P` of each head is `[d, d / heads]`."""
    return {
        role: {f"head_{k + 1}": normal(d, d // heads, dtype=dtype) for k in range(heads)} for role in ("PQ", "PK", "PV")
    }


def make_dense(d, dtype=np.float64):
    return {"weight": normal(d, d, dtype=dtype), "bias": normal(d, dtype=dtype)}


def make_standard(d, L, blocks, heads=1, dtype=np.float64):
    layers = []
    for _ in range(L):
        layers += [make_attention(d, heads, dtype), *(make_dense(d, dtype) for _ in range(blocks + 1))]
    return layers


def make_triangular(d, side, bias, dtype=np.float64):
    kind = {"lower": "LowerTriangular", "upper": "UpperTriangular"}[side]
    weight = {"weight": Packed(normal(d * (d - 1) // 2, dtype=dtype), d, kind)}
    return weight | ({"bias": normal(d, dtype=dtype)} if bias else {})


def make_feed_forward(d, blocks, dtype=np.float64):
    pair = [("lower", False), ("upper", True)]
    return [make_triangular(d, *side, dtype) for side in [*pair, ("lower", True), ("upper", True)] * blocks + pair]


def make_volume(d, L, blocks, skew, dtype=np.float64):
    layers = []
    for _ in range(L):
        A = Packed(normal(d * (d - 1) // 2, dtype=dtype), d, "SkewSymMatrix") if skew else normal(d, d, dtype=dtype)
        layers += [{"A": A}, *make_feed_forward(d, blocks, dtype)]
    return layers


def apply_layers(layers, Z, *, add=False):
    """Return the output of the Julia package for Z, layer by layer, from the arrays in Julia's order."""
    has_tanh = {id(layer): k % 4 in (2, 3) for k, layer in iter_triangular(layers)}
    for k, layer in enumerate(layers):
        if "PQ" in layer:
            Z = columns.standard_attention(Z, *(list(layer[role].values()) for role in ("PQ", "PK", "PV")), add=add)
        elif "A" in layer:
            A = layer["A"]
            if isinstance(A, Packed):
                Z = columns.cayley(Z, columns.unpack(A.S, A.n, "skew"), "skew")
            else:
                Z = columns.cayley(Z, A, "arbitrary")
        elif isinstance(layer["weight"], Packed):
            side = "lower" if layer["weight"].kind == "LowerTriangular" else "upper"
            act = np.tanh if has_tanh[id(layer)] else None
            Z = columns.triangular(Z, layer["weight"].S, side, layer.get("bias"), act)
        else:
            last = k + 1 == len(layers) or "PQ" in layers[k + 1]
            Z = columns.resnet(Z, [(layer["weight"], layer["bias"])], (lambda x: x) if last else np.tanh)
    return Z


def iter_triangular(layers):
    """The triangular layers, with their index since the last attention."""
    k = 0
    for layer in layers:
        if "weight" not in layer:
            k = 0
        else:
            yield k, layer
            k += 1


ARCHITECTURES = {
    "standard": (lambda: make_standard(3, 3, 2), 189),
    "standard, heads": (lambda: make_standard(4, 2, 1, heads=2), None),
    "arbitrary": (lambda: make_volume(3, 3, 2, False), 180),
    "skew": (lambda: make_volume(3, 3, 2, True), 162),
    "feed-forward": (lambda: make_feed_forward(3, 6), 135),
    "wide": (lambda: make_volume(5, 2, 1, True), None),
}


STYLES = [(name, "tagged") for name in ARCHITECTURES] + [("wide", "bare"), ("standard", "plain"), ("skew", "plain")]
STYLES += [(name, "storage") for name in ("skew", "feed-forward")]


@pytest.mark.parametrize(("name", "style"), STYLES)
def test_a_file_is_the_net_that_julia_has(name, style, tmp_path):
    make, count = ARCHITECTURES[name]
    layers = make()
    form = "skew" if style == "plain" and name in ("skew", "wide") else None  # the file does not declare A as skew
    net = bt.load_geometric(JuliaFile(layers, style).write(tmp_path / "net.h5"), attention=form)
    assert net.network.dtype == torch.float64
    assert count is None or sum(value.numel() for value in net.parameters.values()) == count
    d = net.sentence("a").ground and len(net.sentence("a")["x_0_0"])
    Z = RNG.normal(size=(d, 3))
    np.testing.assert_allclose(run_net(net, Z), apply_layers(layers, Z), rtol=1e-10, atol=1e-10)


SKEW = np.array([[0, 0.3, -0.2], [-0.3, 0, 0.5], [0.2, -0.5, 0]])


@pytest.mark.parametrize("first", [SKEW, np.zeros((3, 3))], ids=["skew numbers", "zeros"])
def test_a_full_matrix_is_the_arbitrary_form_for_any_numbers(first, tmp_path):
    """For all units, unless the file or `attention=` declares skew matrices."""
    layers = make_volume(3, 2, 1, False)
    layers[0]["A"] = first
    path, Z = JuliaFile(layers).write(tmp_path / "net.h5"), RNG.normal(size=(3, 4))
    for form in (None, "arbitrary"):
        net = bt.load_geometric(path, attention=form)
        assert {"A_0.value", "A_1.value"} <= net.parameters.keys()
        np.testing.assert_allclose(run_net(net, Z), apply_layers(layers, Z), rtol=1e-10, atol=1e-10)
    with pytest.raises(
        bt.FileError, match=r"L8: expected attention \(A, skew-symmetric\); got attention \(A, a matrix\)"
    ):
        bt.load_geometric(path, attention="skew")


def test_the_skew_form_follows_from_a_type_or_another_unit(tmp_path):
    layers = make_volume(3, 2, 1, True)
    path, Z = JuliaFile(layers).write(tmp_path / "net.h5"), RNG.normal(size=(3, 4))
    for is_typed in (False, True):  # only the first unit written out, then both
        with h5py.File(path, "a") as file:
            for k in (1, 8) if is_typed else (1,):
                write(file, f"L{k}/A", columns.unpack(layers[k - 1]["A"].S, 3, "skew").T)
            if is_typed:
                file["L8/A"].attrs["gml_type"] = np.bytes_("GeometricMachineLearning.SkewSymMatrix")
        np.testing.assert_allclose(run_net(bt.load_geometric(path), Z), apply_layers(layers, Z), rtol=1e-10, atol=1e-10)
        with pytest.raises(bt.FileError, match=r"L8: expected attention \(A, a matrix\), because .*; got .*skew"):
            bt.load_geometric(path, attention="arbitrary")
    with h5py.File(path, "a") as file:
        file["L8/A"][0, 1] += 1
    with pytest.raises(
        bt.FileError, match="L8/A: expected a skew-symmetric matrix, according to its type; got a matrix that is not"
    ):
        bt.load_geometric(path)


def test_a_triangle_of_zeros_fits_either_side(tmp_path):
    layers = make_feed_forward(3, 1)
    for layer in layers:
        layer["weight"] = Packed(np.zeros(3), 3, layer["weight"].kind)
    Z = RNG.normal(size=(3, 4))
    net = bt.load_geometric(JuliaFile(layers, "plain").write(tmp_path / "net.h5"))
    np.testing.assert_allclose(run_net(net, Z), apply_layers(layers, Z), rtol=1e-10, atol=1e-10)


def test_a_form_without_such_attention_is_refused(tmp_path):
    for layers in (make_feed_forward(3, 1), make_standard(3, 1, 1)):
        with pytest.raises(
            bt.BNetError, match="attention: expected None, because the file has no volume-preserving att"
        ):
            bt.load_geometric(JuliaFile(layers).write(tmp_path / "net.h5"), attention="skew")
    with pytest.raises(bt.BNetError, match=r"attention: expected one of .*'skew', 'arbitrary'"):
        bt.load_geometric(JuliaFile(make_volume(3, 1, 1, True)).write(tmp_path / "net.h5"), attention="softmax")


def test_many_layers_keep_their_order(tmp_path):
    """In the file, L10 precedes L2."""
    layers = make_volume(3, 3, 3, False)
    assert len(layers) > 40
    Z = RNG.normal(size=(3, 4))
    net = bt.load_geometric(JuliaFile(layers).write(tmp_path / "net.h5"))
    np.testing.assert_allclose(run_net(net, Z), apply_layers(layers, Z), rtol=1e-10, atol=1e-10)


def test_missing_content_is_named(tmp_path):
    layers = make_standard(4, 2, 1, heads=2)
    path = str(JuliaFile(layers).write(tmp_path / "net.h5"))
    Z = RNG.normal(size=(4, 3))
    with_add = bt.load_geometric(path, add=True)
    np.testing.assert_allclose(run_net(with_add, Z), apply_layers(layers, Z, add=True), rtol=1e-10, atol=1e-10)
    with_relu = bt.load_geometric(path, activation="relu", observe=Normal(0.1))
    assert np.abs(run_net(with_relu.replace({}), Z) - run_net(bt.load_geometric(path), Z)).max() > 1e-3
    assert "y_0" in with_relu.sentence("a b").graph()
    with pytest.raises(bt.BNetError, match="add: expected False, because the file has no standard transformer"):
        bt.load_geometric(JuliaFile(make_feed_forward(3, 1)).write(tmp_path / "vpff.h5"), add=True)


def test_single_precision_and_the_other_byte_order_are_kept(tmp_path):
    layers = make_volume(3, 1, 1, True, np.float32)
    net = bt.load_geometric(JuliaFile(layers).write(tmp_path / "net.h5"))
    assert net.network.dtype == torch.float32
    big_endian = make_volume(3, 1, 1, False, np.dtype(">f8"))
    Z = RNG.normal(size=(3, 3))
    net = bt.load_geometric(JuliaFile(big_endian).write(tmp_path / "big.h5"))
    np.testing.assert_allclose(run_net(net, Z), apply_layers(big_endian, Z), rtol=1e-10, atol=1e-10)


def test_a_projection_of_the_stiefel_manifold_is_its_matrix(tmp_path):
    layers = make_standard(3, 1, 1)
    path = JuliaFile(layers).write(tmp_path / "net.h5")
    with h5py.File(path, "a") as file:
        value = file["L1/PQ/head_1"][()]
        del file["L1/PQ/head_1"]
        group = file.create_group("L1/PQ/head_1")
        group.attrs["gml_type"], group["A"] = np.bytes_("StiefelManifold"), value
    Z = RNG.normal(size=(3, 3))
    np.testing.assert_allclose(run_net(bt.load_geometric(path), Z), apply_layers(layers, Z), rtol=1e-10, atol=1e-10)


# bad files


# Edits that corrupt a file, and the error message: a volume-preserving net, then a standard transformer.
VOLUME = {
    "a gap": (lambda f: f.pop("L2"), "without L2"),
    "more": (lambda f: f.create_group("optimizer"), "optimizer, without L8"),
    "an empty layer": (lambda f: f["L4"].clear(), "L4: expected PQ"),
    "A beside": (lambda f: write(f, "L1/B", [1.0]), "L1: expected A; got A, B"),
    "a bias too much": (lambda f: write(f, "L2/bias", np.ones(3)), "L2: expected no bias"),
    "no bias": (lambda f: f["L3"].pop("bias"), "L3: expected a bias"),
    "another width": (lambda f: widen(f), "L2: expected width 3"),
    "no width": (lambda f: f["L2/weight"].pop("n"), "L2/weight: expected S, n"),
    "upper first": (lambda f: tag(f, "UpperTriangular"), "L2: expected a strictly lower"),
    "a symmetric one": (lambda f: tag(f, "SymmetricMatrix"), "got SymmetricMatrix"),
    "an odd A": (lambda f: write(f, "L1/A", np.ones((3, 2))), "L1/A: expected a square"),
    "ids": (lambda f: write(f, "L1/A", np.ones((3, 3), int)), "L1/A: expected real numbers"),
    "not a number": (lambda f: write(f, "L1/A", np.full((3, 3), np.nan)), "L1/A: expected finite"),
    "two types": (lambda f: write(f, "L1/A", np.ones((3, 3), "f4")), "got torch.float64"),
    "another file": (lambda f: write(f, "L1", h5py.ExternalLink("other.h5", "/L1")), "L1: .* got a link"),
    "numbers elsewhere": (lambda f: write_external(f), "L1/A: expected numbers in the file itself"),
    "a dataset for a layer": (lambda f: write(f, "L1", np.ones(3)), "L1: expected a group"),
    "a datatype for a layer": (lambda f: write(f, "L1", np.dtype("f8")), "L1: expected a group or a dataset"),
    "a type of no string": (lambda f: write_attribute(f, 3), "L1/A: expected one string"),
    "a type without a value": (lambda f: write_attribute(f, h5py.Empty("S3")), "L1/A: expected one string"),
    "a long type": (lambda f: write_attribute(f, np.bytes_("a" * 2000)), "L1/A: expected one string"),
    "two types of a matrix": (lambda f: write_attribute(f, np.array([b"a", b"b"])), "L1/A: expected one string"),
}
STANDARD = {
    "no head": (lambda f: f["L1/PQ"].clear(), "L1/PQ: expected head_1"),
    "a datatype for a head": (lambda f: write(f, "L1/PQ", np.dtype("f8")), "L1/PQ: expected a group or a dataset"),
    "no values": (lambda f: f["L1"].pop("PV"), "L1: expected PQ, PK, PV"),
    "one ResNet layer": (lambda f: [f.pop(f"L{k}") for k in range(3, 7)], "at least two ResNet layers"),
    "fewer in a unit": (lambda f: f.pop("L6"), "L4: expected 2 layers"),
    "a triangle among them": (lambda f: write_triangle(f), "L2: expected a dense"),
}


def widen(file):
    write(file, "L2/weight/S", np.ones(6))
    write(file, "L2/weight/n", 4)


def tag(file, kind):
    file["L2/weight"].attrs["gml_type"] = np.bytes_(kind)


def write_attribute(file, value):
    file["L1/A"].attrs["gml_type"] = value


def write_external(file):
    del file["L1/A"]
    file["L1"].create_dataset("A", (3, 3), "f8", external=[("/etc/hostname", 0, 72)])


def write_triangle(file):
    del file["L2/weight"]
    write(file, "L2/weight/S", np.ones(3))
    write(file, "L2/weight/n", 3)


def write(file, name, value):
    if name in file:
        del file[name]
    file[name] = value


@pytest.mark.parametrize("kind", ["volume", "standard"])
def test_a_file_that_is_not_one_is_refused_with_the_place(kind, tmp_path):
    layers = make_volume(3, 1, 1, False) if kind == "volume" else make_standard(3, 2, 1)
    valid = JuliaFile(layers).write(tmp_path / "sound.h5").read_bytes()
    path = tmp_path / "net.h5"
    for label, (edit, message) in (VOLUME if kind == "volume" else STANDARD).items():
        path.write_bytes(valid)
        with h5py.File(path, "a") as file:
            edit(file)
        with pytest.raises(bt.FileError, match=message) as caught:
            print(label, bt.load_geometric(path))
        assert str(path) in str(caught.value)


def declare(file, name, shape, dtype="f8", **options):
    """Replace a dataset by one that declares numbers without storing any."""
    if name in file:
        del file[name]
    file.create_dataset(name, shape, dtype, **options)


def share(file):
    """Make all layers one stored pair of matrices: a small file that declares a large net."""
    for name in list(file):
        del file[name]
    for name, value in make_dense(40).items():
        write(file, f"L2/{name}", value)
    for role in ("PQ", "PK", "PV"):
        write(file, f"L1/{role}/head_1", normal(40, 40))
    for k in range(3, 60):
        file[f"L{k}"] = file["L2"]


# Edits of a volume-preserving net, which declare numbers that the file does not contain or that do not fit.
DECLARED = {
    "contiguous": (lambda f: declare(f, "L1/A", (30_000, 30_000)), "got 0 bytes in the file"),
    "chunks": (lambda f: declare(f, "L1/A", (30_000, 30_000), chunks=(100, 100)), "got 0 bytes in the file"),
    "fill values": (lambda f: declare(f, "L1/A", (3, 3), fillvalue=0.5), "expected 72 bytes"),
    "a width": (lambda f: declare(f, "L2/weight/n", (), "i8", fillvalue=3), "L2/weight/n: expected 8 bytes"),
    "a rank": (lambda f: declare(f, "L1/A", (3, 3, 10**9)), "expected an array of 2 dims"),
    "a type": (lambda f: declare(f, "L1/A", (30_000, 30_000), "i8"), "expected real numbers"),
    "no shape": (lambda f: write(f, "L1/A", h5py.Empty("f8")), "expected an array of 2 dims"),
    "gzip": (lambda f: declare(f, "L1/A", (3, 3), chunks=(3, 3), compression="gzip"), "h5repack"),
    "a width of the last layer": (lambda f: write(f, "L7/weight/n", 4), "L7/weight/S: expected a vector of length 6"),
    "the last layer": (lambda f: f.pop("L7"), "4 n_blocks"),
    "one layer for all": (share, "the size of the file"),
}


@pytest.mark.parametrize("name", DECLARED)
def test_no_number_is_read_before_the_declared_layers_are_checked(name, tmp_path, monkeypatch):
    """The integers `n`, which declare shapes, are the only numbers that are read."""
    path, original = JuliaFile(make_volume(3, 1, 1, False)).write(tmp_path / "net.h5"), h5py.Dataset.__getitem__
    edit, message = DECLARED[name]
    with h5py.File(path, "a") as file:
        edit(file)
    read = []

    def record(dataset, *arguments):
        read.append((dataset.dtype.kind, dataset.size, dataset.nbytes))
        return original(dataset, *arguments)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", record)
    with pytest.raises(bt.FileError, match=message):
        bt.load_geometric(path)
    assert all(kind == "i" and size == 1 for kind, size, _ in read)
    valid = JuliaFile(make_volume(3, 1, 1, True)).write(tmp_path / "valid.h5")
    read.clear()
    bt.load_geometric(valid)
    assert 0 < sum(num_bytes for _, _, num_bytes in read) <= valid.stat().st_size


@pytest.mark.parametrize("shape", [(), (3_000,)], ids=["one string", "strings that share their bytes"])
def test_an_attribute_is_read_only_if_its_size_is_in_its_type(shape, tmp_path, monkeypatch):
    """The length of a variable-length string in a file can be false, and many strings can share their bytes."""
    path, read = JuliaFile(make_volume(3, 1, 1, False)).write(tmp_path / "net.h5"), []
    with h5py.File(path, "a") as file:
        write_attribute(file, np.full(shape, "SkewSymMatrix", h5py.string_dtype()))
    monkeypatch.setattr(h5py.AttributeManager, "__getitem__", lambda attrs, key: read.append(key))
    with pytest.raises(bt.FileError, match="L1/A: expected one string of a fixed length"):
        bt.load_geometric(path)
    assert not read


def test_what_is_no_hdf5_file_is_refused(tmp_path):
    valid = JuliaFile(make_volume(3, 1, 1, False)).write(tmp_path / "sound.h5").read_bytes()
    for content in (b"", b"not HDF5 at all", valid[: len(valid) // 3], valid[:-200]):
        (tmp_path / "net.h5").write_bytes(content)
        with pytest.raises(bt.FileError, match=re.escape(str(tmp_path))):
            bt.load_geometric(tmp_path / "net.h5")
    with pytest.raises(bt.FileError, match="no such file"):
        bt.load_geometric(tmp_path / "absent.h5")


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    path = JuliaFile(make_feed_forward(3, 1)).write(tmp_path / "net.h5")
    original_import = builtins.__import__

    def import_without_h5py(name, *args, **kwargs):
        if name == "h5py":
            raise ImportError(name)
        return original_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_h5py)
    with pytest.raises(bt.BNetError, match=r"the package h5py.*bnet-transformer\[hdf5\]"):
        bt.load_geometric(path)

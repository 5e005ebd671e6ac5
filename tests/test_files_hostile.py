"""A file that is wrong in any way is a FileError, and costs neither memory nor patience."""

from __future__ import annotations

import functools
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import bnet_transformer as bt
from bnet_transformer import files, tpm
from bnet_transformer.files import plain, store
from bnet_transformer.network import Declaration, Network, declare
from bnet_transformer.tpm import Add, Categorical, Given, Weight
from tests.keeping import rewrite, same


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    bt.bayesuvius(3, heads=2, observe=Categorical(2, labels=("no", "yes"))).save(path)
    return path


def test_what_is_no_net(tmp_path: Path) -> None:
    path = tmp_path / "a"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(bt.FileError, match="no plain file"):
        files.load(tmp_path / "fifo")
    with pytest.raises(bt.FileError, match="got a folder"):
        files.load(tmp_path)
    with pytest.raises(bt.FileError, match="no such file"):
        files.load(path)
    huge = struct.pack("<Q", 2**62)
    for content in (
        b"",
        b"short",
        b"\0" * 8,
        huge,
        huge + b"{}",
        pickle.dumps({"a": 1}) * 9,
        b"PK\x03\x04" * 99,
        b"{" * 99,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 3) + b"{}",
    ):
        path.write_bytes(content)
        with pytest.raises(bt.FileError, match="a: expected a net"):
            files.load(path)
    for metadata in (None, {}, {"format": "pt"}):
        save_file({"w": torch.zeros(2)}, path, metadata)
        with pytest.raises(bt.FileError, match="safetensors of something else"):
            files.load(path)
    for text in ("", "{", "null", "[]", "3", '"x"', "{}", "[" * 100_000, '{"format": "other"}', "1" * 5000):
        save_file({}, path, {store.KEY: text})
        with pytest.raises(bt.FileError):
            files.load(path)


def test_versions(saved: Path) -> None:
    def newer(header: dict[str, Any]) -> None:
        header |= {"version": 2, "library": "9.9.9"}

    for version in (0, -1, "1", None, 1.0, True, [1]):
        with pytest.raises(bt.FileError, match="a format version, a whole number"):
            files.load(rewrite(saved, lambda header, version=version: {**header, "version": version}))  # type: ignore[misc]
    with pytest.raises(
        bt.FileError, match=r"format version 1; got version 2, written by bnet_transformer 9\.9\.9; .*upgrade"
    ):
        files.load(rewrite(saved, newer))


def test_tensors_that_do_not_fit(saved: Path) -> None:
    content = saved.read_bytes()
    zeros = torch.zeros
    for tensors, told in (
        ({"c.logits": None}, "got 1 missing: c.logits"),
        ({"more": zeros(2)}, "got 1 nobody asked for: more"),
        ({"c.logits": zeros(3)}, r"c.logits of shape \(2,\); got shape \(3,\)"),
        ({"c.logits": zeros(2, 1)}, r"got shape \(2, 1\)"),
        ({"c.logits": zeros(2, dtype=torch.int64)}, "c.logits in F16, BF16, F32, F64; got I64"),
        ({"c.logits": zeros(2, dtype=torch.bool)}, "got BOOL"),
        ({"c.logits": zeros(2, dtype=torch.float8_e5m2)}, "got F8_E5M2"),
        ({"c.logits": torch.tensor([0.0, float("nan")])}, "c.logits finite; got 1 entries that are NaN"),
        ({"c.logits": torch.tensor([0.0, float("inf")])}, "NaN or infinite"),
        ({"c.logits": torch.full((2,), -float("inf"))}, "a row of -inf"),
    ):
        with pytest.raises(bt.FileError, match=told):
            files.load(rewrite(saved, **tensors))  # type: ignore[arg-type]
        saved.write_bytes(content)
    files.load(saved)


NODE = ("stacks", 0, "slice", 0)
EDITS: list[tuple[tuple[Any, ...], Any]] = (
    [
        (("stacks",), value)
        for value in (
            None,
            3,
            "x",
            [],
            {},
            [None],
            [[]],
            {"list": []},
            {"dict": [1]},
            {"float": "x"},
            [{"class": "Add"}],
        )
    ]
    + [
        ((*NODE, key), value)
        for key, values in {
            "role": (3, None, ["W"], "x_1", "class", "a b"),
            "tpm": (
                None,
                "Add",
                {},
                {"class": "Plate", "name": "a", "size": 1},
                {"class": "Add"},
                {"class": "Select", "size": ["a"]},
                {"class": "Select", "size": [-1]},
                {"class": "Select"},
            ),
            "parents": ("c", [3], [{"class": "Arrow"}], ["nobody"], [["c"]], {"float": "nan"}),
            "plates": ("word", [1], ["nothing"], ["word", "word"], None),
            "shared": ("yes", 1, None),
            "scope": ("world", 1),
            "shape": ("x", [1.5], [-1], [7]),
            "unheard_of": (1,),
        }.items()
        for value in values
    ]
    + [(("stacks", 0, "slices"), value) for value in (0, -1, 1.0, True, "2", 10**9, 10**30)]
    + [(("stacks", 0, "vocabulary"), value) for value in ("abc", [1], ["a", "a"], [""], [[]])]
    + [
        ((), value)
        for value in (
            {"class": "Node", "role": "x", "tpm": {"class": "Add"}},
            {"class": "Declaration"},
            {"float": "inf"},
        )
    ]
)


def test_json_of_wrong_types(saved: Path) -> None:
    content = saved.read_bytes()
    for place, value in EDITS:
        saved.write_bytes(content)

        def edit(header: dict[str, Any], place: tuple[Any, ...] = place, value: Any = value) -> None:
            at: Any = header
            for key in ("declaration", *place)[:-1]:
                at = at[key]
            at[("declaration", *place)[-1]] = value

        print("edited:", place, value)  # which one failed
        with pytest.raises(bt.FileError, match="expected"):
            files.load(rewrite(saved, edit))


def test_a_hostile_size_costs_no_memory(tmp_path: Path) -> None:
    """Weights of a petabyte, a million slices: refused by the header alone, in a process that has little memory."""
    path = tmp_path / "a"
    files.save(
        declare(Declaration([bt.Stack([bt.Node("W", Weight((3, 5)))], [bt.Node("x", Given(2), plates=["word"])])])),
        path,
    )
    wide = tmp_path / "wide"
    wide.write_bytes(path.read_bytes())

    def large(header: dict[str, Any]) -> None:
        header["declaration"]["stacks"][0]["slice"][0]["tpm"]["size"] = [10**8, 10**7]

    rewrite(wide, large)
    with pytest.raises(bt.FileError, match=r"W_0.value of shape \(100000000, 10000000\)"):
        files.load(wide)
    rewrite(wide, large, **{"W_0.value": None})
    with pytest.raises(bt.FileError, match="1 missing"):
        files.load(wide)
    rewrite(path, lambda header: header["declaration"]["stacks"][0].update(slices=10**6))  # type: ignore[func-returns-value]
    with pytest.raises(bt.FileError, match="50000 over all slices; got 3 and 1000003"):
        files.load(path)
    deep = '{"list": ' * 50_000 + "[]" + "}" * 50_000
    save_file(
        {},
        path,
        {
            store.KEY: json.dumps({"format": store.FORMAT, "version": 1, "seed": 0, "declaration": {}}).replace(
                "{}", deep
            )
        },
    )
    with pytest.raises(bt.FileError):
        files.load(path)


QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@functools.cache
def fuzzed() -> Network:
    return bt.bayesuvius(2, heads=2, observe=Categorical(2)).network


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("net") / "net"
    files.save(fuzzed(), path)
    return path.read_bytes()


def load_or_refuse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        found = files.load(path)
    except bt.BNetError as error:
        assert isinstance(error, bt.FileError) and str(path) in str(error)
    else:
        same(found, fuzzed())


def test_a_flipped_bit_of_a_weight_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(bt.FileError, match="SHA-256"):
        files.load(tmp_path / "a")
    rewrite(tmp_path / "a", lambda header: header.update(seed=1))
    with pytest.raises(bt.FileError, match="SHA-256"):
        files.load(tmp_path / "a")


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
LEAF |= st.sampled_from([*plain.REGISTRY, "x", "c", "word", "inf"])
FIELDS = st.sampled_from(["n", "size", "role", "tpm", "kind", "score", "class", "list", "dict", "float"])
INNER = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(FIELDS, LEAF, max_size=3)
OBJECT = st.builds(
    lambda name, rest: {**rest, "class": name},
    st.sampled_from(list(plain.REGISTRY)),
    st.dictionaries(FIELDS, INNER, max_size=3),
)
JSON = INNER | OBJECT | st.lists(INNER | OBJECT, max_size=3) | st.dictionaries(FIELDS, INNER | OBJECT, max_size=2)


@QUIET
@given(data=st.data(), value=JSON)
def test_hostile_json(tmp_path: Path, content: bytes, data: st.DataObject, value: Any) -> None:
    """Anything at any place of the header."""
    path = tmp_path / "a"
    path.write_bytes(content)

    def edit(header: dict[str, Any]) -> None:
        at: Any = header
        while True:
            key = data.draw(st.sampled_from(sorted(at)) if isinstance(at, dict) else st.integers(0, len(at) - 1))
            if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.integers(0, 3)) == 0:
                at[key] = value
                return
            at = at[key]

    rewrite(path, edit)
    load_or_refuse(path, path.read_bytes())


FITS: list[tuple[object, Any, bool]] = [
    (1, int, True),
    (True, int, False),
    (1.5, int, False),
    (1, float, True),
    (True, bool, True),
    (None, int | None, True),
    ("a", int | None, False),
    ((1, 2), tuple[int, ...], True),
    ((1, "a"), tuple[int, ...], False),
    ((1, "a"), tuple[int, str], True),
    ((1,), tuple[int, str], False),
    (["a"], list[str], True),
    (("a",), list[int], False),
    ({"a": 1}, dict[str, int], True),
    ({"a": "b"}, dict[str, int], False),
    ("x", Any, True),
    ("x", object, True),
    (Add(), tpm.TPM, True),
    (3, tpm.TPM, False),
    ((1, 2), int | tuple[int, ...], True),
    ("ab", tuple[str, ...], False),
]


def test_fits() -> None:
    for value, hint, wanted in FITS:
        assert plain.fits(value, hint) is wanted, (value, hint)


def test_no_pickle_is_near(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading works where pickle cannot load anything."""

    def refused(*arguments: Any, **options: Any) -> None:
        raise AssertionError("pickle")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refused)
    files.load(saved)

"""A file that is wrong in any way is a FileError, and costs neither memory nor patience."""

from __future__ import annotations

import functools
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import bnet_transformer as bt
from bnet_transformer import files
from bnet_transformer.files import store
from bnet_transformer.network import Network
from bnet_transformer.tpm import Categorical
from tests.keeping import rewrite


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
    for tensors in ({"c.logits": None}, {"more": zeros(2)}, {"c.logits": zeros(3)}, {"c.logits": zeros(2).double()}):
        with pytest.raises(bt.FileError, match="SHA-256"):
            files.load(rewrite(saved, **tensors))  # type: ignore[arg-type]
        saved.write_bytes(content)
    files.load(saved)


@functools.cache
def fuzzed() -> Network:
    return bt.bayesuvius(2, heads=2, observe=Categorical(2)).network


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("net") / "net"
    files.save(fuzzed(), path)
    return path.read_bytes()


def test_a_flipped_bit_of_a_weight_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(bt.FileError, match="SHA-256"):
        files.load(tmp_path / "a")
    rewrite(tmp_path / "a", lambda header: header.update(seed=1))
    with pytest.raises(bt.FileError, match="SHA-256"):
        files.load(tmp_path / "a")


def test_no_pickle_is_near(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading works where pickle cannot load anything."""

    def refused(*arguments: Any, **options: Any) -> None:
        raise AssertionError("pickle")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refused)
    files.load(saved)

"""Nets on disk: a loaded net equals the saved one, and classes of other packages are loaded only with consent."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import _core, tpm
from bnet_transformer.declare import Declaration, Network, declare, io
from bnet_transformer.tpm import Add, Categorical, Given, Parent
from tests.cases import CASES, Case
from tests.file_helpers import assert_same, rewrite

TRUST = ("tests.custom_tpms",)


def test_parameters_are_read_in_the_order_of_the_net(tmp_path: Path) -> None:
    """Draws of NUTS and SVI depend on this order; a file stores parameters by name."""
    net = bt.bayesuvius(3, heads=2, observe=Categorical(2))
    net.save(tmp_path / "net.safetensors")
    assert list(bt.load(tmp_path / "net.safetensors").parameters) == list(net.parameters)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    bt.bayesuvius(3, heads=2, observe=Categorical(2, labels=("no", "yes"))).save(path)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_round_trip(case: Case, tmp_path: Path) -> None:
    net = case.net.network
    path = tmp_path / "net.safetensors"
    io.save(net, path)
    assert_same(io.load(path, trust=TRUST), net)
    assert [result.name for result in tmp_path.iterdir()] == ["net.safetensors"]
    first = path.read_bytes()
    io.save(io.load(path, trust=TRUST), path)
    assert path.read_bytes() == first  # the same net is the same file


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bits_survive_in_every_type(dtype: torch.dtype, tmp_path: Path) -> None:
    net = bt.bayesuvius(4, heads=3).to(dtype).network
    values = net.parameters["W_q_0.values"].clone()
    tiny = torch.finfo(dtype)
    values.view(-1)[:5] = torch.tensor([-0.0, tiny.tiny / 2, tiny.max, tiny.min, tiny.eps], dtype=torch.float64).to(
        dtype
    )
    net = net.with_parameters({"W_q_0.values": values})
    io.save(net, tmp_path / "a")
    result = io.load(tmp_path / "a")
    assert_same(result, net)
    assert result.parameters["W_q_0.values"].view(-1)[0].signbit()


def test_strided_shared_and_trained_tensors(tmp_path: Path) -> None:
    net = bt.bayesuvius(4, heads=2).network
    strided = torch.randn(2, 4, 8, dtype=torch.float64)
    shared = torch.nn.Parameter(torch.randn(2, 4, 4))
    net = net.with_parameters(
        {
            "W_q_0.values": strided[..., ::2].transpose(1, 2),
            "W_k_0.values": shared,
            "W_v_0.values": shared,
            "c.logits": torch.zeros(1).expand(2),
        }
    )
    io.save(net, tmp_path / "a")
    result = io.load(tmp_path / "a")
    assert_same(result, net)
    assert os.path.getsize(tmp_path / "a") < 6000  # the numbers of the view, not its storage
    assert not any(value.requires_grad for value in result.parameters.values())
    negated = torch.complex(torch.ones(1), torch.ones(1)).conj().imag  # a negated view of 1, contiguous
    io.save(bt.bayesuvius(4, heads=1).network.with_parameters({"c.logits": negated}), tmp_path / "a")
    assert io.load(tmp_path / "a").parameters["c.logits"].tolist() == [-1]


def test_a_loaded_net_does_not_depend_on_its_file(saved: Path) -> None:
    net = io.load(saved)
    before = {name: value.clone() for name, value in net.parameters.items()}
    with saved.open("r+b") as opened:  # in place: a mapped file would show through
        opened.write(b"\xff" * saved.stat().st_size)
    assert all(torch.equal(value, before[name]) for name, value in net.parameters.items())
    net.parameters["c.logits"].add_(1)


def test_every_tpm_of_the_package_is_restored() -> None:
    """With fields that are not the default."""
    mask = bt.Reach("mask", table=((True, False), (True, True)))
    objects = [
        Categorical(3, probabilities=(0.5, 0.25, 0.25), labels=("a", "\ud800é\n", "0")),
        tpm.Codebook(3, (2, 2), prior=0.1, spread=1e-300),
        tpm.Select(4),
        tpm.Weight((2, 3)),
        tpm.Attention(tpm.Bilinear(2), tpm.Normaliser("sigmoid"), "queries", tpm.Relative(3), residual=True),
        tpm.Attention(tpm.Dot(None, rotary=1e4), bias=tpm.Buckets(8, 20, two_sided=False)),
        tpm.Attention(tpm.Dot(None, tpm.Rotary(5e5, 4, 8.0, (1.0, 4.0, 8192)))),
        tpm.Concat(plates=2),
        tpm.Read(tpm.Dot(0.1 + 0.2)),
        tpm.Norm("rms", eps=1e-12),
        tpm.Sinusoid(7, halves=True),
        bt.Arrow("x", mask, slice=3, pick={"head": "c", "atom": "m"}),
        bt.Arrow("x", bt.Reach("window", 2), slice="last"),
        bt.Arrow("x", bt.Reach("recent", 3)),
        bt.Node("x", Add(), ["a", bt.Arrow("b", "causal")], ["word"], shared=True, scope="corpus", shape=(3,)),
    ]
    for obj in objects:
        stored = json.loads(json.dumps(io.to_json_data(obj, "it")))
        assert io.from_json_data(stored, "it") == obj
        assert not list(io.find_untrusted_classes(stored))
    kinds = {getattr(tpm, name) for name in tpm.__all__}
    missing = [k for k in kinds if dataclasses.is_dataclass(k) and k not in io.CLASS_REGISTRY.values()]
    assert set(missing) == {tpm.TPM, tpm.Score, tpm.Bias}


@dataclass(frozen=True)
class Part:
    names: list[str]
    table: dict[tuple[int, str], float]


@dataclass(frozen=True)
class Odd(tpm.TPM):
    """A user-defined TPM with fields of every kind."""

    part: Part
    limit: float = float("-inf")
    extra: Any = None
    pair: tuple[int, str] = (1, "a")
    maybe: int | None = None

    @dataclass(frozen=True)
    class Inner:
        k: int = 3

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        return (2,)


LOCAL = __name__


def make_odd(**fields: Any) -> Declaration:
    tpm_ = Odd(**{"part": Part(["a", "b"], {(1, "x"): 0.5}), **fields})
    stack = bt.Stack([bt.Node("z", tpm_, plates=["word"])], [bt.Node("x", Given(2), plates=["word"])])
    return Declaration([stack], name="odd")


def test_a_user_defined_class_is_stored_by_its_path_and_needs_consent(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    net = declare(make_odd(extra=Odd.Inner(4)))
    io.save(net, path)
    names = {f"{LOCAL}:{name}" for name in ("Odd", "Part", "Odd.Inner")}
    for trust in ((), False, "nobody", (f"{LOCAL}:Odd",), [f"{LOCAL}:Part", f"{LOCAL}:Odd"], (f"{LOCAL}x", LOCAL[:-1])):
        with pytest.raises(bt.FileError, match=f"got .*{LOCAL}:(Part|Odd.Inner).*pass trust="):
            io.load(path, trust=trust)
    for trust in (True, LOCAL, [LOCAL], names):
        result = io.load(path, trust=trust)
        assert_same(result, net)
        tpm_ = result.declaration.stacks[0].slice[0].tpm
        assert isinstance(tpm_, Odd) and type(tpm_.part.names) is list and tpm_.limit == -np.inf
    with pytest.raises(bt.BNetError, match="trust: expected True, or names"):
        io.load(path, trust=3)  # type: ignore[arg-type]


def test_nothing_is_imported_without_consent(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("open(__file__ + '.ran', 'w').close()\nraise SystemError('boom')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def evil(header: dict[str, Any]) -> None:
        header["declaration"]["stacks"][0]["slice"][0]["tpm"]["class"] = "evil:Boom"

    rewrite(saved, evil, signed=True)
    for trust in ((), "evil:Boo", "evi", False):
        with pytest.raises(bt.FileError, match="evil:Boom"):
            io.load(saved, trust=trust)
    assert "evil" not in sys.modules and not (tmp_path / "evil.py.ran").exists()
    with pytest.raises(bt.FileError, match="boom"):
        io.load(saved, trust="evil")
    assert (tmp_path / "evil.py.ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "os:nothing",
        "nowhere_at_all:X",
        "bnet_transformer.models.nothing:X",
        "bnet_transformer.models.bayesuvius:Node",
        "bnet_transformer.models.bayesuvius:TPM",
        "builtins:dict",
        "pathlib:Path",
        "Nothing",
        "TPM",
        "Score",
        "",
        ":",
        "a:",
        ":b",
        "..:x",
        "os:path.join",
        7,
        None,
        ["Add"],
    ],
)
def test_a_trusted_path_must_lead_to_a_dataclass(saved: Path, name: object) -> None:
    def other(header: dict[str, Any]) -> None:
        header["declaration"]["stacks"][0]["slice"][0]["tpm"] = {"class": name}

    with pytest.raises(bt.FileError):
        io.load(rewrite(saved, other, signed=True), trust=True)


def test_model_files_give_no_classes_of_other_modules(saved: Path) -> None:
    """A class of a model file needs no consent, but only if that file defines it."""

    def lent(header: dict[str, Any]) -> None:
        header["declaration"]["stacks"][0]["slice"][0]["tpm"]["class"] = "bnet_transformer.models.bayesuvius:Select"

    with pytest.raises(bt.FileError, match="a class in the module that defines it"):
        io.load(rewrite(saved, lent, signed=True))


def test_save_refuses_values_that_cannot_be_restored(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Local(Add):  # type: ignore[misc]
        pass

    class Undecorated(Odd):
        pass

    def make_network(tpm_: Any) -> Network:
        return declare(
            Declaration(
                [
                    bt.Stack(
                        [bt.Node("z", tpm_, ["x"] if isinstance(tpm_, Add) else [], ["word"])],
                        [bt.Node("x", Given(2), plates=["word"])],
                    )
                ]
            )
        )

    part = Part([], {})
    for tpm_, message in (
        (Local(), "top level of a module"),
        (Undecorated(part), "decorator @dataclass"),
        (Odd(part, extra={1, 2}), r"extra: expected a value that can be stored; got \{1, 2\}"),
        (Odd(part, extra=object()), "a value that can be stored"),
        (Odd(part, extra=torch.zeros(2)), "a value that can be stored"),
        (Odd(part, extra=Odd), "a value that can be stored"),
        (Odd(part, extra=float("nan")), "equal to its copy"),
        (Odd(part, extra=10**5000), "JSON can store"),
    ):
        with pytest.raises(bt.BNetError, match=message):
            io.save(make_network(tpm_), tmp_path / "a")
        assert not list(tmp_path.iterdir())
    network = bt.bayesuvius(2).network
    nan = {**network.parameters, "c.logits": torch.tensor([0.0, float("nan")])}
    for parameters, message in (
        (nan, "NaN"),
        ({**network.parameters, "zz.value": torch.zeros(2)}, "zz.value"),
        ({}, "a tensor c.logits"),
        ({**network.parameters, "c.logits": torch.zeros(2).to(torch.float8_e5m2)}, "float8"),
        ({**network.parameters, "c.logits": torch.zeros(2, device="meta")}, "meta"),
        ({**network.parameters, "c.logits": torch.zeros(2).to_sparse()}, "sparse"),
    ):
        with pytest.raises(bt.BNetError, match=message):
            io.save(replace(network, parameters=parameters), tmp_path / "a")
    for other in (None, bt.bayesuvius(2), network.declaration):
        with pytest.raises(bt.BNetError, match="save: expected a Network"):
            io.save(other, tmp_path / "a")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_saving_is_whole_or_not_at_all(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, net = saved.read_bytes(), bt.bayesuvius(5).network

    def fail(tensors: Any, path: Path, **named: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(io, "save_file", fail)
        with pytest.raises(bt.FileError, match="No space left"):
            io.save(net, saved)
    assert saved.read_bytes() == before and len(list(saved.parent.iterdir())) == 1
    saved.chmod(0o640)
    io.save(net, saved)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o640 and saved.read_bytes() != before


def test_the_mode_is_that_of_any_new_file_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "net")
    io.save(bt.bayesuvius(2).network, link)
    assert link.is_symlink() and (tmp_path / "net").stat().st_mode == (tmp_path / "plain").stat().st_mode
    io.load(link)


def test_devices_and_pipes_are_written_to_and_stay(tmp_path: Path) -> None:
    net, pipe, link = bt.bayesuvius(2).network, tmp_path / "pipe", tmp_path / "link"
    io.save(net, tmp_path / "plain")
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    before = sorted(tmp_path.iterdir())
    for path in (pipe, link):
        with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
            io.save(net, path)
            assert reader.read() == (tmp_path / "plain").read_bytes()
            with pytest.raises(ZeroDivisionError), _core.files.atomic_write(path) as temporary:
                temporary.write_bytes(b"half")
                raise ZeroDivisionError
            assert not reader.read()
    pipe_ends = os.pipe()  # the standard output of a shell's pipe has no path
    with _core.files.atomic_write(f"/dev/fd/{pipe_ends[1]}") as temporary:
        temporary.write_bytes(b"whole")
    assert os.read(pipe_ends[0], 9) == b"whole"
    for end in pipe_ends:
        os.close(end)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and link.is_symlink() and sorted(tmp_path.iterdir()) == before
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(bt.FileError, match="No space left"):
        io.save(net, full)
    assert full.is_char_device()


@pytest.mark.parametrize(
    "path", ["", "a\0b", None, 3, b"bytes", "/nowhere/at/all/a", "/proc/nothing.x", ".", "x" * 300]
)
def test_paths_that_cannot_be_written_or_read(path: Any) -> None:
    with pytest.raises(bt.FileError):
        io.save(bt.bayesuvius(2).network, path)
    with pytest.raises(bt.FileError):
        io.load(path)

"""Files cut short, with flipped bits, of other versions: the very same values, or one clear error."""

from __future__ import annotations

import importlib.util
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import bnet_transformer as bt
from bnet_transformer import training
from tests.keeping import rewrite
from tests.soak import jobs
from tests.soak.probing import Found, Probe, Setup, Tally, folder

VERSIONS = (0, -1, 2, 99, "1", None, 1.5, True)


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it lies, how what it holds is read (a string that tells all of it), and whether by us."""

    path: Path
    read: Callable[[], str]
    ours: bool = True


def _net(path: Path) -> str:
    net = bt.load(path)
    return f"{net.declaration!r} {net.network.seed} {net.network.tokenizer!r} {jobs.digest(dict(net.parameters))}"


def _fit(path: Path) -> str:
    fit = bt.load(path)
    told = {name: getattr(fit, name) for name in ("method", "bounds", "measured", "judged_on", "learned", "finished")}
    samples = {**fit.samples, **fit.statistics, **fit.net.parameters}
    return f"{told} {fit.net.declaration!r} {jobs.digest(samples)}"


def _checkpoint(path: Path) -> str:
    found = training.kept(jobs.decoder(), path)
    return f"{found.losses} {found.held_out} {found.steps} {jobs.digest(dict(found.net.parameters))}"


def _pretrained(place: Path) -> str:
    net = bt.from_pretrained(place)
    return f"{net.declaration!r} {jobs.digest(dict(net.parameters))} {net.sentence('the cat sat').words}"


def _geometric(path: Path) -> str:
    net = bt.load_geometric(path)
    return f"{net.declaration!r} {jobs.digest(dict(net.parameters))}"


def _folder_of_bert(place: Path) -> None:
    """A folder as transformers leaves it, with random weights and a vocabulary of words."""
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *jobs.WORDS]
    settings = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
    settings |= {"max_position_embeddings": 9, "vocab_size": len(words), "type_vocab_size": 2}
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu", **settings}
    config |= {"layer_norm_eps": 1e-12, "pad_token_id": 0}
    (place / "config.json").write_text(json.dumps(config))
    (place / "vocab.txt").write_text("\n".join(words) + "\n")
    shapes = {
        "embeddings.word_embeddings.weight": (len(words), 8),
        "embeddings.position_embeddings.weight": (9, 8),
        "embeddings.token_type_embeddings.weight": (2, 8),
        "pooler.dense.weight": (8, 8),
        "pooler.dense.bias": (8,),
    }
    block = "encoder.layer.0."
    for name, shape in {
        "attention.self.query": (8, 8),
        "attention.self.key": (8, 8),
        "attention.self.value": (8, 8),
        "attention.output.dense": (8, 8),
        "intermediate.dense": (6, 8),
        "output.dense": (8, 6),
    }.items():
        shapes |= {f"{block}{name}.weight": shape, f"{block}{name}.bias": shape[:1]}
    for name in ("embeddings.LayerNorm", block + "attention.output.LayerNorm", block + "output.LayerNorm"):
        shapes |= {f"{name}.weight": (8,), f"{name}.bias": (8,)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, place / "model.safetensors")


def _hdf5(path: Path) -> None:
    """Parameters of a geometric transformer as the Julia package writes them."""
    import h5py
    import numpy as np

    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for layer in range(3):
            group = file.create_group(f"L{layer + 1}")
            if layer == 0:
                for role in ("PQ", "PK", "PV"):
                    group.create_group(role)["head_1"] = draw.normal(size=(3, 3))
            else:
                group["weight"], group["bias"] = draw.normal(size=(3, 3)), draw.normal(size=3)


def _saved_net(place: Path) -> Kind:
    path = place / "net.safetensors"
    jobs.told_net().save(path)
    return Kind(path, partial(_net, path))


def _saved_fit(place: Path) -> Kind:
    path = place / "fit.safetensors"
    jobs.fit(jobs.mixture(), 0).save(path)
    return Kind(path, partial(_fit, path))


def _kept(place: Path) -> Kind:
    jobs.run("train", place / "run", every=8)
    path = place / "run" / "checkpoint.safetensors"
    return Kind(path, partial(_checkpoint, path))


def _of_bert(name: str, place: Path) -> Kind:
    _folder_of_bert(place)
    return Kind(place / name, partial(_pretrained, place), ours=False)


def _of_julia(place: Path) -> Kind:
    _hdf5(place / "a.h5")
    return Kind(place / "a.h5", partial(_geometric, place / "a.h5"), ours=False)


KINDS: dict[str, Callable[[Path], Kind]] = {
    "net": _saved_net,
    "fit": _saved_fit,
    "checkpoint": _kept,
    **{f"{name} of a stranger": partial(_of_bert, name) for name in ("config.json", "vocab.txt", "model.safetensors")},
}
OURS = ("net", "fit", "checkpoint")
if importlib.util.find_spec("h5py"):
    KINDS["HDF5 of a stranger"] = _of_julia


def _flipped(content: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def _places(content: bytes, draw: random.Random, count: int) -> list[int]:
    """Bytes of a file: its first ones, those of its header, of its middle and its last ones."""
    edges = [0, 1, 7, 8, 9, len(content) // 2, len(content) - 9, len(content) - 1]
    header = min(len(content), 8 + struct.unpack("<Q", content[:8])[0]) if content[:8][5:] == b"\0\0\0" else 0
    inside = [draw.randrange(8, header) for _ in range(count)] if header > 8 else []
    return [each for each in edges if 0 <= each < len(content)] + inside + draw.choices(range(len(content)), k=count)


def _told(kind: Kind, content: bytes, whole: str) -> tuple[str, str]:
    """What a changed file is read as: "same", "other" or "refused"; or "wrong", with what came."""
    kind.path.write_bytes(content)
    try:
        found = kind.read()
    except bt.FileError as error:
        return ("refused", "") if "\n" not in str(error) else ("wrong", f"an error of several lines: {error}")
    except bt.BNetError as error:
        return ("wrong" if kind.ours else "refused"), f"{type(error).__name__}: {error}"
    except BaseException as error:  # whatever comes instead is what the probe is for
        return "wrong", f"{type(error).__name__}: {error}"
    return ("same" if found == whole else "other"), "read as something else"


def probe_damage(name: str, setup: Setup) -> Found:
    """Cut at every kind of byte, and each bit of a sample of bytes flipped."""
    with folder() as place:
        kind = KINDS[name](place)
        law = "refused by one FileError, or read as it was" if kind.ours else "read, or refused by one BNetError"
        tally = Tally(f"cut and flipped: {name}", law)
        whole, content = kind.read(), kind.path.read_bytes()
        seen = {"refused": 0, "same": 0, "other": 0, "wrong": 0}
        for seed, draw in setup.tries():
            for at in _places(content, draw, 4):
                for what, changed in (
                    (f"cut at byte {at}", content[:at]),
                    *((f"bit {bit} of byte {at} flipped", _flipped(content, at, bit)) for bit in range(8)),
                ):
                    came, why = _told(kind, changed, whole)
                    seen[came] += 1
                    good = came in ("same", "refused") or (came == "other" and not kind.ours)
                    tally.add(good, f"seed {seed}, {what}: {why}")
    counts = f"{seen['refused']} refused, {seen['same']} read as they were"
    if kind.ours:
        return tally.found(counts)
    return tally.found(f"{counts}, {seen['other']} read as other numbers or names: the format has no checksum")


def probe_versions(setup: Setup) -> Found:
    """Newer versions, versions that are none, and no version at all."""
    tally = Tally("files of other versions", "one FileError that names the version")
    with folder() as place:
        for name in OURS:
            kind = KINDS[name](place)
            content = kind.path.read_bytes()
            for version in (*VERSIONS, "gone"):
                rewrite(kind.path, partial(_with_version, version))
                came, why = _error(kind)
                tally.add(came is bt.FileError and "version" in why, f"{name}, version {version!r}: {why}")
                kind.path.write_bytes(content)
    return tally.found("net, fit and checkpoint")


def _with_version(version: object, header: dict[str, Any]) -> None:
    if version == "gone":
        del header["version"]
    else:
        header["version"] = version


def _error(kind: Kind) -> tuple[type | None, str]:
    """The error with which a file is refused."""
    try:
        kind.read()
    except Exception as error:  # whatever comes is told
        return type(error), str(error)
    return None, "read"


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """A tenth of `times` for each kind of file; each try cuts and flips at a dozen bytes."""
    few = Setup(max(1, setup.times // 10), setup.seed)
    return [*((partial(probe_damage, name), few) for name in KINDS), (probe_versions, setup)]

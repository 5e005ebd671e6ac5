"""Every parser as a target `target(data: bytes)`, with sound inputs to begin with, and how these are spoilt.

A target ends in peace (the input was refused with a `BNetError`, or its value went out and came back the same), or it
raises: that is a fault. Hypothesis draws inputs by `inputs`; any other fuzzer of bytes takes the same targets.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner
from hypothesis import strategies as st
from safetensors.torch import save as save_bytes

import bnet_transformer as bt
from bnet_transformer import axes, files
from bnet_transformer._core.tokenizer import Tokenizer
from bnet_transformer.cli import main, shared
from bnet_transformer.cli.signatures import Numbers
from bnet_transformer.data.arrays import map_tokens
from bnet_transformer.export.text import from_json, to_json
from bnet_transformer.files import checkpoint, plain, store
from bnet_transformer.inference.surgery import matching
from bnet_transformer.pretrained import from_hugging_face, from_lens, to_hugging_face, to_lens
from bnet_transformer.training import kept
from tests import flat_options
from tests.keeping import same

SECONDS = 10.0  # of the processor, that one input may take: a busy machine takes longer by the clock
WAITING = 12  # times as long, by the clock, where it waits for something
LONGEST = 20_000  # letters of an error
CANARY = "fuzz_canary"  # a module that nobody may import

# the law


class Executed(AssertionError):
    """An input made the library run a program, import what it names, or ask the network."""


FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class")
FORBIDDEN += ("socket.connect", "socket.getaddrinfo", "ctypes.dlopen", "marshal.loads", "webbrowser.open")
_watching = threading.local()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """What an interpreter tells of itself; the code of a module that is imported is no input."""
    if not getattr(_watching, "on", False):
        return
    if event == "import" and str(arguments[0]).split(".")[0] == CANARY:
        raise Executed(f"{event}: {arguments[0]}")
    if event in FORBIDDEN or (event == "exec" and not _importing()):
        if _importing():
            return
        raise Executed(f"{event}: {arguments!r:.200}")


def _importing() -> bool:
    """True where a module is being imported."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@functools.cache
def _install() -> None:
    sys.addaudithook(_hook)  # for good: a hook cannot be taken away


@contextmanager
def watched() -> Iterator[None]:
    """While it lasts, to run a program, a string of code or a pickle, or to ask the network, is an error."""
    _install()
    _watching.on = True
    try:
        yield
    finally:
        _watching.on = False


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What takes the processor for longer, or waits for much longer, is interrupted by an error, where signals are told
    (POSIX, the main thread)."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, _: object) -> None:
        told = "of the processor" if number == signal.SIGPROF else f"by the clock, {WAITING} times over"
        raise TimeoutError(f"it took more than {seconds:g} s {told}")

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, WAITING * seconds))
    before = [signal.signal(number, late) for number, _, _ in clocks]
    try:
        for _, clock, most in clocks:
            signal.setitimer(clock, most)
        yield
    finally:
        for (number, clock, _), habit in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, habit)


@dataclass(frozen=True)
class Parser:
    """What reads an input and proves its value, sound inputs, whether these are JSON, pieces of their grammar."""

    name: str
    read: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    is_json: bool = False
    pieces: Sequence[bytes] = ()
    runs_programs: bool = False  # a figure is laid out by a program

    def target(self, data: bytes) -> None:
        """Read one input: any exception but a clear refusal is a fault."""
        guard = watched() if self._warm and not self.runs_programs else nullcontext()  # warm, whatever it runs
        with warnings.catch_warnings(), within(SECONDS), guard:
            warnings.simplefilter("ignore")
            try:
                self.read(data)
            except bt.BNetError as error:
                assert 0 < len(str(error)) < LONGEST, f"an error of {len(str(error))} letters"

    @functools.cached_property
    def _warm(self) -> bool:
        """True once sound inputs were read: what is imported, or compiled, for a first call is no input's doing."""
        for data in self.sound:
            with suppress(bt.BNetError):
                self.read(data)
        return True

    @functools.cached_property
    def sound(self) -> tuple[bytes, ...]:
        """The sound inputs."""
        return tuple(self.seeds())


@functools.cache
def place() -> Path:
    """A folder of this process, gone with it."""
    held = tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True)
    _held.append(held)
    return Path(held.name)


_held: list[Any] = []


def put(name: str, data: bytes) -> Path:
    """A file of that folder."""
    path = place() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def text_of(data: bytes) -> str:
    """Bytes as text: UTF-8, and a lone surrogate for what is none, as a command line tells it."""
    return data.decode("utf-8", "surrogateescape")


# nets, fits, checkpoints


@functools.cache
def net() -> bt.BNet:
    """A small mixture of heads."""
    return bt.bayesuvius(2, heads=2, vocabulary=("the", "cat", "sat"), observe=bt.tpm.Categorical(2, labels=("n", "y")))


@functools.cache
def trainee() -> bt.BNet:
    """A small net of words."""
    return bt.decoder(4, heads=2, slices=1, vocabulary=("the", "cat", "sat"))


def read_net(data: bytes) -> None:
    """A file of a net, or of a fit."""
    found = bt.load(put("net.safetensors", data))
    inner = getattr(found, "network", None)
    again = files.load(put("again.safetensors", files.as_bytes(inner)))
    same(again, inner)


def seeds_net() -> list[bytes]:
    """Nets as files."""
    x = bt.Node("x", bt.tpm.Given(2), plates=["word"])
    small = bt.BNet(bt.Declaration([bt.Stack([bt.Node("x", bt.tpm.Linear(2), ["x"], ["word"])], prologue=[x])]))
    return [files.as_bytes(each.network) for each in (small, net(), bt.encoder(4, heads=2, slices=1))]


def read_declaration(data: bytes) -> None:
    """The JSON of a net's header, as the metadata of a file have it."""
    where = place() / "net.safetensors"
    with files.reading(where, store.WANTED):
        header = store._read_header(where, {store.KEY: data.decode("utf-8", "surrogatepass")})
        found = store._read_net(where, header, ())
    text = json.dumps(plain.to_plain(found.declaration, "declaration"))
    assert plain.from_plain(json.loads(text), "declaration") == found.declaration


@functools.cache
def seeds_declaration() -> list[bytes]:
    """Headers of several architectures."""
    nets = (
        net(),
        trainee(),
        bt.encoder_decoder(4, heads=2, slices=1, vocabulary=["a", "b"]),
        bt.geometric(2, blocks=1),
        bt.volume_preserving(2, blocks=1),
        bt.recurrent(),
    )
    return [store._content(each.network)[1][store.KEY].encode() for each in nets]


DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool}
DTYPES |= {"BF16": torch.bfloat16, "F16": torch.float16, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
MOST = 10**6  # numbers of a tensor that an input may make


@contextmanager
def making() -> Iterator[None]:
    """What cannot be made of an input is no fault of a reader."""
    try:
        yield
    except Exception as error:
        raise bt.BNetError("an input", expected="one that can be made", got=type(error).__name__) from error


def _parts(data: bytes) -> tuple[Any, dict[str, torch.Tensor]]:
    """A head and tensors as JSON tells them; of a tensor whose numbers are none, so many zeros."""
    told = json.loads(data)
    return told["head"], {name: _tensor(*each) for name, each in told["tensors"].items()}


def _tensor(dtype: str, shape: list[int], values: Any) -> torch.Tensor:
    if values is None:
        assert np.prod(shape, dtype=float) < MOST
        return torch.zeros(shape, dtype=DTYPES[dtype])
    return torch.tensor(values, dtype=torch.float64).to(DTYPES[dtype]).reshape(shape)


def _rebuilt(data: bytes) -> Path:
    """A file with a head and tensors as JSON tells them, and the hash of both: only what they say can be wrong."""
    with making():
        return _written(*_parts(data))


def read_signed(data: bytes) -> None:
    """A net's header and tensors, as JSON tells them, under the hash that is theirs."""
    with making():
        head, tensors = _parts(data)
        with suppress(Exception):
            head["sha256"] = store._digest(head, tensors)
        whole = save_bytes(tensors, {store.KEY: json.dumps(head)})
    read_net(whole)


def seeds_signed() -> list[bytes]:
    """Nets with parameters of several kinds, one with a tokenizer."""
    found = []
    names = {dtype: name for name, dtype in DTYPES.items()}
    small = bt.bayesuvius(2, heads=2, key_dim=1, vocabulary=("the", "cat"), observe=bt.tpm.Categorical(2))
    for network in (small.network, replace(small.network, tokenizer=Tokenizer(seeds_tokenizer()[0].decode()))):
        tensors, metadata = store._content(network)
        told = {k: [names[v.dtype], list(v.shape), v.double().flatten().tolist()] for k, v in tensors.items()}
        found.append(json.dumps({"head": json.loads(metadata[store.KEY]), "tensors": told}).encode())
    return found


def read_header(data: bytes) -> None:
    """The header of a safetensors file, before as many zeros as it tells of: of a net, a fit, a pretrained model."""
    with making():
        ends = re.findall(rb'"data_offsets": ?\[\d+, ?(\d{1,7})\]', data)
        whole = len(data).to_bytes(8, "little") + data + bytes(min(max(map(int, ends), default=0), MOST))
    put("whole/config.json", json.dumps(GPT2).encode())
    folder = put("whole/model.safetensors", whole).parent
    for read in (lambda: bt.load(folder / "model.safetensors"), lambda: bt.from_pretrained(str(folder))):
        _answered(read)


def seeds_header() -> list[bytes]:
    """The headers of such files."""
    fit = _rebuilt(seeds_fit()[0]).read_bytes()
    each = (files.as_bytes(net().network), save_bytes(weights("gpt2"), {"format": "pt"}), fit)
    return [data[8 : 8 + int.from_bytes(data[:8], "little")] for data in each]


# a stranger's class


FRIEND = "fuzz_friend"  # a module that is trusted; what it imports is not


@functools.cache
def friend() -> types.ModuleType:
    """A module with a node's TPM of its own; whoever asks it for anything else than a class is found out."""
    module = types.ModuleType(FRIEND)
    sys.modules[FRIEND] = module

    def told(name: str) -> object:
        raise AttributeError(name) if name.startswith("__") else Executed(f"asked for {name}")

    exec("import os, builtins, dataclasses, bnet_transformer as bt", vars(module))
    own = dataclasses.dataclass(frozen=True)(type("Own", (bt.tpm.Linear,), {"__module__": FRIEND}))
    vars(module).update(Own=own, Other=functools.partial(own), __getattr__=told)
    return module


def read_consent(data: bytes) -> None:
    """The name of a class, wherever a net's header has one: nothing is imported, or made, that was not named."""
    friend()
    name = data.decode("utf-8", "replace")
    head = json.loads(seeds_declaration()[0])
    inner = head["declaration"]["stacks"][0]["slice"][0]
    holders = (inner, inner["tpm"], head["declaration"])
    where = place() / "net.safetensors"
    for holder in holders:
        kept, holder["class"] = holder["class"], name
        for trust in ((), (FRIEND,), (f"{FRIEND}:Own",)):
            before = set(sys.modules)
            found = _answered(lambda trust=trust: _of_header(where, head, trust))
            made = (
                {type(node.tpm).__module__ for stack in found.declaration.stacks for node in stack.slice}
                if found
                else set()
            )  # type: ignore[attr-defined]
            assert set(sys.modules) == before, set(sys.modules) - before
            assert all(each.startswith("bnet_transformer.") or (each == FRIEND and trust) for each in made), made
        holder["class"] = kept


def _of_header(where: Path, head: Any, trust: Any) -> Any:
    with files.reading(where, store.WANTED):
        return store._read_net(where, head, trust)


SEEDS_CONSENT = [b"Linear", b"os:system", b"builtins:eval", b"fuzz_friend:Own", b"fuzz_friend:os.system", b".os:system"]
SEEDS_CONSENT += [b"fuzz_friend:bt.tpm.Linear", b"fuzz_friend:builtins.eval", b"bnet_transformer.models.encoder:Node"]
SEEDS_CONSENT += [b"bnet_transformer.models:encoder", b"bnet_transformer.models.encoder:torch.hub", b"antigravity:x"]
SEEDS_CONSENT += [b"fuzz_friend:Own.__init__.__globals__", b"fuzz_friend:__getattr__", b"this:s", b"fuzz_canary:Thing"]
SEEDS_CONSENT += [b"bnet_transformer.models._sublayers:dataclasses.dataclass", b"fuzz_friend:", b":x", b":", b"a:b:c"]


def _written(head: Any, tensors: Mapping[str, torch.Tensor]) -> Path:
    path = place() / "run" / checkpoint.NAME
    path.parent.mkdir(exist_ok=True)
    files.write_tensors(path, head, tensors)
    return path


def _told(path: Path) -> bytes:
    """A file of tensors as such JSON; numbers stay few."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    head, tensors = files.read_tensors(path, "", *_FORM[path.suffix])
    listed = {
        name: [names[value.dtype], list(value.shape), value.double().flatten().tolist()]
        for name, value in tensors.items()
    }
    return json.dumps({"head": head, "tensors": listed}).encode()


_FORM = {".safetensors": (checkpoint.FORMAT, checkpoint.VERSION), ".fit": ("bnet_transformer fit", 1)}


def read_checkpoint(data: bytes) -> None:
    """A run that goes on from a checkpoint."""
    path = _rebuilt(data)
    kept(trainee(), path.parent)
    bt.train(trainee(), ["the cat"], steps=3, checkpoints=bt.Checkpoints(path.parent, resume=True), progress=False)


def seeds_checkpoint() -> list[bytes]:
    """The checkpoint of a run of a step."""
    folder = place() / "began"
    bt.train(
        trainee(),
        ["the cat"],
        steps=2,
        checkpoints=bt.Checkpoints(folder, resume=folder.exists()),
        every=1,
        progress=False,
    )
    return [_told(folder / checkpoint.NAME)]


@functools.cache
def fitted() -> tuple[bt.BNet, Any]:
    """A small net of vectors, and two sentences."""
    return bt.bayesuvius(2, heads=2, key_dim=1, observe=bt.tpm.Normal(0.5)), (torch.ones(2, 2, 2),) * 2


CHAINS = {"method": "nuts", "chains": 1, "warmup": 1, "draws": 2, "learn": ("c.logits",)}
METHODS: tuple[dict[str, Any], ...] = ({"method": "em", "steps": 2}, {"method": "map", "steps": 2}, CHAINS)


def read_ascent(data: bytes) -> None:
    """A fit that goes on from a checkpoint, by the method of which it is."""
    path = _rebuilt(data)
    told = str(json.loads(data)["head"])
    asked = next((each for each in METHODS if repr(each["method"]) in told), CHAINS)
    small, sentences = fitted()
    flat_options.fit(small, sentences, folder=path.parent, resume=True, every=1, progress=False, **asked)


def seeds_ascent() -> list[bytes]:
    """The checkpoints of fits."""
    small, sentences = fitted()
    found = []
    for asked in METHODS:
        folder = place() / f"began-{asked['method']}"
        flat_options.fit(small, sentences, folder=folder, resume=folder.exists(), every=1, progress=False, **asked)
        found.append(_told(folder / checkpoint.NAME))
    return found


def read_fit(data: bytes) -> None:
    """A file of a fit."""
    found = bt.load(_rebuilt(data))
    found.save(place() / "again.fit")


def seeds_fit() -> list[bytes]:
    """Fits of two methods."""
    small, sentences = fitted()
    path, found = place() / "began.fit", []
    for options in ({"method": "em"}, {"method": "nuts", "chains": 1, "warmup": 1, "draws": 2, "learn": ("c.logits",)}):
        steps = {} if "chains" in options else {"steps": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flat_options.fit(small, sentences, progress=False, **options, **steps).save(path)
        found.append(_told(path))
    return found


# what others wrote


def read_hdf5(data: bytes) -> None:
    """A parameter file of GeometricMachineLearning.jl."""
    found = bt.load_geometric(put("net.h5", data))
    assert all(bool(value.isfinite().all()) for value in found.parameters.values())


def seeds_hdf5() -> list[bytes]:
    """A small standard transformer, and a volume-preserving one."""
    h5py = _module("h5py")
    if h5py is None:
        return []
    found = []
    for fill in (_standard, _volume_preserving):
        held = io.BytesIO()
        with h5py.File(held, "w") as file:
            fill(file)
        found.append(held.getvalue())
    return found


def read_groups(data: bytes) -> None:
    """Such a file by its parts, as JSON: what lies at each path, or where a link there leads, and what they say."""
    h5py = _module("h5py")
    path = place() / "parts.h5"
    with making():
        told = json.loads(data)
        with h5py.File(path, "w") as file:
            for name, (kind, shape, value) in told["parts"].items():
                if kind == "hard":
                    file[name] = file[value]
                elif kind in ("soft", "outer"):
                    file[name] = h5py.SoftLink(value) if kind == "soft" else h5py.ExternalLink(value, "/")
                elif kind == "elsewhere":
                    file.create_dataset(name, shape=shape, dtype="f8", external=[(value, 0, 8 * max(shape or [1]))])
                elif value is None:  # as large as it is told, and never written
                    file.create_dataset(name, shape=shape, dtype=kind, chunks=True if shape else None)
                else:
                    file[name] = np.asarray(value, dtype=kind).reshape(shape)
            for name, (key, value) in told["says"].items():
                file[name].attrs[key] = value
    read_hdf5(path.read_bytes())


def seeds_groups() -> list[bytes]:
    """Every kind of layer, and what a file must not do."""
    eye, n = ["f8", [2, 2], [1.0, 0.0, 0.0, 1.0]], ["i8", [], 2]
    heads = {f"L1/P{role}/head_{k}": ["f8", [1, 2], [1.0, 0.0]] for role in "QKV" for k in (1, 2)}
    dense = {
        f"L{k}/{name}": each for k in (2, 3) for name, each in (("weight", eye), ("bias", ["f8", [2], [0.0, 0.0]]))
    }
    on = {f"L1/PQ/head_{k}/storage": ["f8", [1, 2], [1.0, 0.0]] for k in (1, 2)}
    on |= {name: each for name, each in heads.items() if "PQ" not in name} | dense
    steps: dict[str, Any] = {}
    for k in range(2, 8):
        steps |= {f"L{k}/weight/storage": ["f8", [1], [1.0]], f"L{k}/weight/metadata/n": n}
        steps |= {} if k in (2, 6) else {f"L{k}/bias": ["f8", [2], [0.0, 0.0]]}
    says = {
        f"L{k}/weight": ["gml_type", "GML.LowerTriangular" if k % 2 == 0 else "UpperTriangular"] for k in (2, 3, 4, 5)
    }
    whole = {"L1/A": ["f8", [2, 2], [0.0, 1.0, -1.0, 0.0]]}
    links = {"L1/A/S": ["f8", [1], [1.0]], "L1/A/n": ["elsewhere", [1], "/dev/zero"]}
    found = [(heads | dense, {}), (on, {f"L1/PQ/head_{k}": ["parameter_type", "StiefelManifold"] for k in (1, 2)})]
    found += [(whole | steps, says), (whole | steps, {"L1/A": ["gml_type", "SkewSymMatrix"]}), (links | steps, {})]
    found += [({"L1/A": ["f8", [8000, 8000], None], "L2": ["hard", [], "/L1"]}, {})]
    found += [({"L1/A": ["soft", [], "/L2"], "L2": ["outer", [], "other.h5"]}, {})]
    return [json.dumps({"parts": parts, "says": told}).encode() for parts, told in found]


def _standard(file: Any) -> None:
    for which in ("PQ", "PK", "PV"):
        file[f"L1/{which}/head_1"] = np.eye(2)
    for k in (2, 3):
        file[f"L{k}/weight"], file[f"L{k}/bias"] = np.eye(2), np.zeros(2)


def _volume_preserving(file: Any) -> None:
    file["L1/A/S"], file["L1/A/n"] = np.ones(1), 2
    for k in range(2, 8):
        file[f"L{k}/weight/S"], file[f"L{k}/weight/n"] = np.ones(1), 2
        if k not in (2, 6):  # the first of a linear pair
            file[f"L{k}/bias"] = np.zeros(2)


GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 4, "n_embd": 4, "n_layer": 1}
GPT2 |= {"n_head": 2, "n_positions": 5, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4, "hidden_size": 4}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 3}
LLAMA |= {"max_position_embeddings": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
LLAMA |= {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@functools.cache
def weights(kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a small model."""
    if kind == "llama":
        shapes = {"model.embed_tokens": (4, 4), "model.norm": (4,), "lm_head": (4, 4)}
        inner = {"input_layernorm": (4,), "post_attention_layernorm": (4,), "self_attn.q_proj": (4, 4)}
        inner |= {"self_attn.k_proj": (2, 4), "self_attn.v_proj": (2, 4), "self_attn.o_proj": (4, 4)}
        inner |= {"mlp.gate_proj": (3, 4), "mlp.up_proj": (3, 4), "mlp.down_proj": (4, 3)}
        shapes |= {f"model.layers.0.{name}": shape for name, shape in inner.items()}
        return {f"{name}.weight": torch.full(shape, 0.5) for name, shape in shapes.items()}
    shapes = {"wte.weight": (4, 4), "wpe.weight": (5, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    inner = {"ln_1": (4,), "ln_2": (4,), "attn.c_attn": (4, 12), "attn.c_proj": (4, 4)}
    inner |= {"mlp.c_fc": (4, 16), "mlp.c_proj": (16, 4)}
    shapes |= {f"h.0.{name}.weight": shape for name, shape in inner.items()}
    shapes |= {f"h.0.{name}.bias": shape[-1:] for name, shape in inner.items()}
    return {f"transformer.{name}": torch.full(shape, 0.5) for name, shape in shapes.items()}


def read_config(data: bytes) -> None:
    """The config.json of a folder."""
    kind = "llama" if b"llama" in data else "gpt2"
    put(f"{kind}/model.safetensors", save_bytes(weights(kind)))
    bt.from_pretrained(str(put(f"{kind}/config.json", data).parent))


WORDY = {"vocab_size": 4, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 3}
WORDY |= {"max_position_embeddings": 8, "num_key_value_heads": 1, "rotary_pct": 1.0, "id2label": {"0": "a", "1": "b"}}
STACKED = {"vocab_size": 4, "d_model": 4, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 3}
STACKED |= {"decoder_ffn_dim": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "scale_embedding": True}
T5 = {"model_type": "t5", "vocab_size": 4, "d_model": 4, "d_kv": 2, "d_ff": 3, "num_layers": 1, "num_heads": 2}
T5 |= {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 4, "relative_attention_max_distance": 6}
VIT = {**WORDY, "model_type": "vit", "image_size": [9, 9], "patch_size": [4, 3], "num_channels": 3}
TURNED = {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8}, "layer_types": ["sliding_attention"], "sliding_window": 3,
          "use_sliding_window": True}  # fmt: skip


def seeds_config() -> list[bytes]:
    """A config of each family."""
    wordy = ("bert", "albert", "roberta", "mpnet", "gpt_neox", "mistral", "qwen2")
    found = [GPT2, LLAMA, LLAMA | TURNED, T5, VIT, *({**WORDY, "model_type": name} for name in wordy)]
    found += [{**STACKED, "model_type": name} for name in ("bart", "marian")] + [
        {**LLAMA, **TURNED, "model_type": "qwen2"}
    ]
    found += [{**WORDY, "model_type": "bert", "architectures": ["BertForSequenceClassification"]}]
    found += [{"model_type": "distilbert", "vocab_size": 4, "dim": 4, "n_layers": 1, "n_heads": 2, "hidden_dim": 3}]
    return [json.dumps(each).encode() for each in found]


def read_index(data: bytes) -> None:
    """The index of weights in several files."""
    put("parts/config.json", json.dumps(GPT2).encode())
    put("parts/part.safetensors", save_bytes(weights("gpt2")))
    bt.from_pretrained(str(put("parts/model.safetensors.index.json", data).parent))


def read_weights(data: bytes) -> None:
    """The weights of a folder."""
    put("whole/config.json", json.dumps(GPT2).encode())
    bt.from_pretrained(str(put("whole/model.safetensors", data).parent))


def seeds_index() -> list[bytes]:
    """An index of one file."""
    return [json.dumps({"weight_map": dict.fromkeys(weights("gpt2"), "part.safetensors")}).encode()]


# tokens


def _tokenizer(model: dict[str, Any], **parts: Any) -> bytes:
    whole: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    whole |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return json.dumps({**whole, **parts, "model": model}).encode()


def seeds_tokenizer() -> list[bytes]:
    """Small tokenizers of each kind."""
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "the": 3, "cat": 4, "##s": 5, "s": 6, "a": 7, "c": 8, "t": 9}
    special = [
        {
            "id": k,
            "content": name,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for k, name in enumerate(("[UNK]", "[CLS]", "[SEP]"))
    ]
    bert = {"type": "TemplateProcessing", "special_tokens": {
        name: {"id": name, "ids": [vocab[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")
    }}  # fmt: skip
    bert["single"] = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    bert["pair"] = [*bert["single"], {"Sequence": {"id": "B", "type_id": 1}}]
    pieces = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocab}
    pieces["max_input_chars_per_word"] = 100
    merges = {"type": "BPE", "dropout": None, "unk_token": "[UNK]", "vocab": vocab | {"ca": 10}, "merges": [["c", "a"]]}
    merges |= dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix")) | {"fuse_unk": False}
    split = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}
    lower = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}
    lower["strip_accents"] = None
    other = {"type": "Replace", "pattern": {"String": "x"}, "content": "a"}
    scored = [["<unk>", 0.0], ["a", -1.0], ["t", -2.0]]
    return [
        _tokenizer({"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}, pre_tokenizer={"type": "Whitespace"}),
        _tokenizer(
            pieces,
            added_tokens=special,
            post_processor=bert,
            pre_tokenizer={"type": "BertPreTokenizer"},
            normalizer=lower,
        ),
        _tokenizer(merges, pre_tokenizer=split, normalizer=other),
        _tokenizer({"type": "Unigram", "unk_id": 0, "vocab": scored, "byte_fallback": False}),
    ]  # fmt: skip


def read_tokenizer(data: bytes) -> None:
    """A tokenizer.json, and a sentence that it reads."""
    reader = Tokenizer(data.decode("utf-8", "replace"))
    for said in ("the cats sat", ["the", "cats"], "a\u00e9\u4e2d x"):
        with suppress(bt.BNetError):
            _proved(reader, said)
    assert all(isinstance(name, str) for name in reader.vocabulary)


def _proved(reader: Tokenizer, said: str | list[str], pair: str | None = None) -> None:
    """Spans lie in the text, groups part the tokens, and there is one entry for each token."""
    found = reader.read(said, pair)
    text = said if isinstance(said, str) else " ".join(said)
    texts = (text, pair or "")
    assert len({len(each) for each in (found.tokens, found.ids, found.spans, found.special, found.segments)}) == 1
    assert [k for group in found.groups for k in group] == list(range(len(found.ids)))
    for span, segment in zip(found.spans, found.segments, strict=True):
        assert span is None or 0 <= span[0] <= span[1] <= len(texts[min(segment, 1)]) or len(set(texts)) > 1


@functools.cache
def readers() -> tuple[Tokenizer, ...]:
    """The small tokenizers."""
    return tuple(Tokenizer(text.decode()) for text in seeds_tokenizer())


def read_text(data: bytes) -> None:
    """A text, by several tokenizers, and by a net that parts it at spaces."""
    text = text_of(data)
    for reader in readers():
        with suppress(bt.BNetError):
            _proved(reader, text)
        with suppress(bt.BNetError):
            _proved(reader, text.split(), None)
        with suppress(bt.BNetError):
            _proved(reader, text, text[::-1])
    found = _answered(lambda: net().sentence(text).words)
    assert found in (None, tuple(text.split()))


def read_vocabulary(data: bytes) -> None:
    """The files of a folder beside its weights: `name`, a line feed and the content of each, parted by NUL."""
    from bnet_transformer.pretrained.source import folder_to_source

    folder = place() / "vocabulary"
    for name in BESIDE:
        (folder / name).unlink(missing_ok=True)
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    put("vocabulary/model.safetensors", save_bytes(weights("gpt2")))
    put("vocabulary/config.json", json.dumps(GPT2).encode())
    for part in data.split(b"\0"):
        name, _, content = part.partition(b"\n")
        if text_of(name) in BESIDE:
            put(f"vocabulary/{name.decode()}", content)
    text = folder_to_source(folder).tokenizer
    if text is not None:
        read_tokenizer(text.encode())


BESIDE = ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "merges.txt", "vocab.json", "tokenizer.json")
BESIDE += ("config.json", "1_Pooling/config.json")
SEEDS_VOCABULARY = [
    b'vocab.txt\n[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n##s\0tokenizer_config.json\n{"do_lower_case": true}',
    b'vocab.json\n{"<s>": 0, "</s>": 1, "t": 2, "h": 3, "th": 4}\0merges.txt\n#version: 0.2\nt h\n'
    b'\0special_tokens_map.json\n{"mask_token": {"content": "<mask>"}}',
    b'vocab.json\n{"<|endoftext|>": 0, "t": 1}\0merges.txt\n',
    b'1_Pooling/config.json\n{"word_embedding_dimension": 4, "pooling_mode_mean_tokens": true}\0tokenizer.json\n{}',
    b'config.json\n{"architectures": ["GPT2Model"]}\0vocab.txt\n[UNK]\n[CLS]\n[SEP]\0tokenizer_config.json\n'
    b'{"cls_token": {"content": "[CLS]"}, "strip_accents": true, "tokenize_chinese_chars": false}',
]


def read_graph(data: bytes) -> None:
    """Node-link JSON."""
    found = from_json(data)
    again = from_json(to_json(found))
    assert (again.nodes == found.nodes, again.graph == found.graph) == (True, True) or b"NaN" in data
    assert sorted(again.edges) == sorted(found.edges)


def seeds_graph() -> list[bytes]:
    """A sentence's graph, and a folded one."""
    return [to_json(each).encode() for each in (net().sentence("the cat").graph(), net().graph())]


def read_stream(data: bytes) -> None:
    """A file of tokens: its first byte tells which kind."""
    found = map_tokens(put("tokens.npy" if data[:1] == b"n" else "tokens.bin", data[1:]))
    assert found.ndim == 1 and int(np.asarray(found).sum()) >= -(2**63)


def seeds_stream() -> list[bytes]:
    """Both kinds, and an archive that says it is one."""
    found = [b"b" + np.arange(5, dtype=np.uint16).tobytes()]
    for save in (np.save, np.savez):
        held = io.BytesIO()
        save(held, np.arange(5))
        found.append(b"n" + held.getvalue())
    return found


# names and what is written on a command line


@functools.cache
def sentences() -> tuple[bt.Sentence, ...]:
    """Sentences whose names are asked for."""
    two = bt.encoder_decoder(4, heads=2, slices=1, vocabulary=["a", "b"])
    return net().sentence("the cat"), two.sentence({"enc": "a b", "dec": "b"})


@functools.cache
def pretrained() -> bt.BNet:
    """A model whose names others have names for."""
    put("named/config.json", json.dumps(GPT2).encode())
    return bt.from_pretrained(str(put("named/model.safetensors", save_bytes(weights("gpt2"))).parent))


def read_name(data: bytes) -> None:
    """A name of nodes, wherever one is asked for."""
    name = text_of(data)
    assert axes.join(*axes.split(name)) == name
    assert axes.role_fault(name) is None or isinstance(axes.role_fault(name), str)
    for s in sentences():
        asks: list[Callable[[], object]] = [
            lambda s=s: s[name], lambda s=s: s.parents(name), lambda s=s: s.posterior(name), lambda s=s: s.tpm(name),
            lambda s=s: s.do({name: 0}), lambda s=s: s.observe({name: "y"}), lambda s=s: s.separated(name, "x_0_0"),
            lambda s=s: matching(s.ground, name), lambda s=s: s.undo(name), lambda s=s: s.graph(words=name),
        ]  # fmt: skip
        found = [_answered(ask) for ask in asks]
        assert (found[1] is not None) == (name in s.graph(weights=True)), name
    for ask in (axes.as_reach, lambda n: from_lens(pretrained(), n), lambda n: from_hugging_face(pretrained(), n)):
        _answered(lambda ask=ask: ask(name))
    for there, back in ((to_lens, from_lens), (to_hugging_face, from_hugging_face)):
        told = _answered(lambda there=there: there(pretrained(), name))
        if isinstance(told, str) and there is to_lens:
            assert from_lens(pretrained(), told), back
    _answered(
        lambda: bt.sweep(net().sentence("the cat"), net().sentence("cat the"), at=name, metric={"y_1": ("n", "y")})
    )


def _answered(ask: Callable[[], object]) -> object:
    """An answer, or None where it was refused."""
    try:
        return ask()
    except bt.BNetError as error:
        assert 0 < len(str(error)) < LONGEST
        return None


SEEDS_NAME = [b"x_0_1", b"enc_x_1_0", b"W_q_0", b"q_0_*", b"c", b"y_1", b"y_1[0]", b"v -> a", b"x_next", b"*", b"j_0_0"]
SEEDS_NAME += [b"blocks.0.attn.hook_q[:, 1, 0, :]", b"transformer.h.0.attn.c_attn.output[:, 0, 0:2]", b"window"]


def read_spec(data: bytes) -> None:
    """What people write behind `--do`, `--metric`, `--slices`, `--words`."""
    told = text_of(data)
    _answered(lambda: shared.values("--do", [told]))
    _answered(lambda: Numbers().convert(told, None, None))
    _answered(lambda: shared.states("--metric", told))
    found = _answered(lambda: shared.names("NODE", told))
    assert found is None or shared.names("NODE", ",".join(found)) == found  # type: ignore[arg-type]


SEEDS_SPEC = [b"c=1", b'y_2="7"', b"x_0_1=1.5,2", b"q_0_*=zero", b"y_1=cat,dog", b"0,1", b"enc=20,dec=30", b"1e400"]

SLOW = ("bench", "heads")  # programs of their own, minutes
DRY = {"HF_HUB_OFFLINE": "1", "BNET_DEBUG": "0"}


def read_command(data: bytes) -> None:
    """Arguments of the command line, parted by NUL; slashes are taken out, so that files stay in the folder."""
    words = [each.replace("/", "|") for each in text_of(data).split("\0")]
    if words[0] in SLOW or any(each.startswith("--open") for each in words):
        return
    put("sentences.txt", b"the cat sat\tthe dog sat\n")
    more = ["--steps", "1", "--dim", "4", "--heads", "2"] if words[0] in ("train", "fit") else []
    before = os.getcwd()
    os.chdir(place())
    try:
        runner = CliRunner(env=DRY)
        found = runner.invoke(main, [*words[:1], *more, *words[1:]])
    finally:
        os.chdir(before)
    assert found.exit_code in (0, 2), f"exit {found.exit_code}: {found.output[-300:]}"
    if found.exit_code == 2:
        errors = [line for line in found.stderr.splitlines() if not line.startswith("Warning: ")]
        assert len(errors) == 1 and errors[0].startswith("Error: ") and len(errors[0]) < LONGEST, found.stderr


def seeds_command() -> list[bytes]:
    """Commands that end well."""
    asked = [
        ("ask", "posterior", "c", "the cat sat", "--given", "y_2=cat", "--json"),
        ("ask", "posterior", "c,y_1", "the cat sat", "--do", "c=1", "--top", "3"),
        ("ask", "separated", "x_0_0", "x_1_2", "the cat sat", "--given", "q_0_2,k_0_0"),
        ("ask", "reads", "the cat sat", "--word", "sat", "--paths", "2", "--residual", "0.5"),
        ("ask", "blanket", "q_0_1", "the cat sat"),
        ("cost", "the cat sat", "--want", "x_1", "--batch", "2"),
        ("cost", "--words", "128"),
        ("draw", "the cat", "-o", "cat.json", "--slices", "0", "--words", "cat", "--min-weight", "0.1"),
        ("draw", "the cat", "-o", "cat.dot", "--limit", "50", "--no-weights"),
        ("sweep", "the cat sat", "the dog sat", "--answer", "cat,dog", "--at", "x", "--over", "slice"),
        ("sweep", "-f", "sentences.txt", "--metric", "y_1=cat,dog", "--at", "v -> a"),
        ("explore", "the cat", "-o", "cat.html", "--title", "<b>", "--posterior", "c", "--detail", "words"),
        ("models",),
        ("completion", "bash"),
        ("--version",),
        ("ask", "--help"),
    ]
    return ["\0".join(each).encode() for each in asked]


def read_completed(data: bytes) -> None:
    """A line that a shell asks to be completed, as it stands behind the program's name."""
    kind, _, line = text_of(data.replace(b"\0", b" ")).partition(" ")
    asked = {"COMP_WORDS": f"bnet-transformer {line}", "COMP_CWORD": str(line.count(" ") + 1)}
    asked["_BNET_TRANSFORMER_COMPLETE"] = f"{kind}_complete"
    found = CliRunner(env={**DRY, **asked}).invoke(main, [], prog_name="bnet-transformer")
    assert found.exit_code in (0, 1, 2) and isinstance(found.exception, SystemExit | None), found.exception


SEEDS_COMPLETED = [
    b"bash ask posterior c -",
    b"zsh dra",
    b"fish draw 'the cat' -o cat.",
    b"bash -m ti",
    b"bash ask --top ",
]


def read_message(data: bytes) -> None:
    """What the page of a notebook's widget sends back."""
    widget, told = _widget()
    del told[:]
    with making():
        content = json.loads(data)
    with suppress(bt.BNetError):
        widget._heard(None, content, [])
    assert len(told) == 1 and set(told[0]) <= {"id", "error"}, told
    json.dumps(widget.about, allow_nan=False)


@functools.cache
def _widget() -> tuple[Any, list[Any]]:
    """A widget without a kernel, and what it answers."""
    told: list[Any] = []
    found: Any = net().sentence("the cat").do(c=0).widget()
    found.send = lambda content, buffers=None: told.append(content)
    return found, told


SEEDS_MESSAGE = [
    b'{"id": 1, "do": [["x_0_1", {"set": "zero"}], ["q_0_*", {"set": "zero"}]]}',
    b'{"id": 2, "do": [["x_0_1", {"set": "node", "from": "x_0_0"}], ["c", {"set": "state", "state": 1}]]}',
    b'{"id": 3, "undo": ["x_0_1"]}',
    b'{"id": 4, "undo": []}',
]


def read_lines(data: bytes) -> None:
    """A file of sentences."""
    from bnet_transformer.cli.learning import lines_of

    found = lines_of(shared.Source((), str(put("lines.txt", data))))
    assert found.texts and all(found.texts)
    for observed in ("next", "words", "label"):
        _answered(lambda observed=observed: found.pairs(found.observed(observed)))


SEEDS_LINES = [b"the cat sat\nthe dog\n", b"the cat\tn y\nthe dog\ty n\n", b"\xef\xbb\xbfthe cat\tyes\n"]

PIECES = [b"null", b"true", b"-1", b"1e999", b"NaN", b"Infinity", b"[]", b"{}", b'""', b'"\\ud800"', b"\\u0000", b"../"]
PIECES += [b"{0.__class__}", b"%s", b"os:system", b"fuzz_canary:Thing", b'{"class": "fuzz_canary:Thing"}', b"[" * 3000]
PIECES += [b"9" * 5000, b"99999999999999999999", b"\xff\xfe", b"\xed\xa0\x80", "ſ²٣\u202e".encode(), b"\0"]
HEADINGS = (b'"F8_E4M3"', b'"F64"', b'"C64"', b'"data_offsets": [0, 8]', b"[0, 0]", b'"shape": [0]', b'"__metadata__"')
PATHS = (
    b":",
    b".",
    b"os",
    b"builtins",
    b"bnet_transformer.models.",
    b"fuzz_friend",
    b"__class__",
    b"..",
    b"fuzz_canary",
)
CLASSES = (b'"class"', b'"Linear"', b'"bnet_transformer.models._x:X"')
NAMES = [b"_0", b"_1", b"*", b"[0]", b"[:, 0]", b".", b" -> ", b"_00", b"_-1", b"x", b"enc_", b"_" * 40, "_٣".encode()]


def all_parsers() -> dict[str, Parser]:
    """Every parser, by name."""
    cars = ["--json", "--do", "--given", "-m", "tiny", "-o", "a.svg", "a.csv", "--pair", "--top", "-f", "-", "--", "\0"]
    known = [
        Parser("net file", read_net, seeds_net),
        Parser("signed net", read_signed, seeds_signed, True, CLASSES),
        Parser("safetensors header", read_header, seeds_header, True, HEADINGS),
        Parser("declaration", read_declaration, seeds_declaration, True, CLASSES),
        Parser("class of a stranger", read_consent, lambda: SEEDS_CONSENT, pieces=PATHS),
        Parser("checkpoint", read_checkpoint, seeds_checkpoint, True),
        Parser("checkpoint of a fit", read_ascent, seeds_ascent, True),
        Parser("fit file", read_fit, seeds_fit, True),
        Parser("HDF5", read_hdf5, seeds_hdf5),
        Parser("parts of HDF5", read_groups, seeds_groups, True),
        Parser("config.json", read_config, seeds_config, True),
        Parser("index of weights", read_index, seeds_index, True),
        Parser("pretrained weights", read_weights, lambda: [save_bytes(weights("gpt2"))]),
        Parser("tokenizer.json", read_tokenizer, seeds_tokenizer, True),
        Parser("vocabulary files", read_vocabulary, lambda: SEEDS_VOCABULARY),
        Parser("text", read_text, lambda: [b"the cats sat", "İ ǅ ﬁ 中文 e\u0301".encode()]),
        Parser("graph JSON", read_graph, seeds_graph, True),
        Parser("token stream", read_stream, seeds_stream),
        Parser("name", read_name, lambda: SEEDS_NAME, pieces=NAMES),
        Parser("value on a command line", read_spec, lambda: SEEDS_SPEC, pieces=(b",", b"=", b'"', b"zero", b"nan")),
        Parser("file of sentences", read_lines, lambda: SEEDS_LINES, pieces=(b"\t", b"\n", b"\r", b"_")),
        Parser("widget's message", read_message, lambda: SEEDS_MESSAGE, True, NAMES),
        Parser("completed line", read_completed, lambda: SEEDS_COMPLETED, False, [each.encode() for each in cars]),
        Parser("command line", read_command, seeds_command, False, [each.encode() for each in cars] + NAMES, True),
    ]  # fmt: skip
    return {each.name: each for each in known}


# spoiling


LEAVES = [None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan")]
LEAVES += ["", "x", "\0", "\ud800", "../x", "os:system", "fuzz_canary:Thing", "{0.__class__}", "same", "word", [], {}]
LEAVES += [[[]], [None], [-1], {"class": "Add"}, {"class": "fuzz_canary:Thing"}, {"float": "nan"}, {"list": []}]
LEAVES += [{"dict": [[[], 1]]}, {"dict": []}, "a" * 5000, [0] * 500, {"": None}]


@dataclass(frozen=True)
class Edit:
    """One change: what is done, where (a share of the length), and with what."""

    kind: int
    at: float
    length: int
    piece: bytes = field(default=b"")

    def of_bytes(self, data: bytes) -> bytes:
        """The bytes with the change."""
        at = int(self.at * (len(data) + 1))
        ways = (
            lambda: data[:at] + self.piece + data[at + self.length :],
            lambda: data[:at] + self.piece + data[at:],
            lambda: data[:at] + data[at + self.length :],
            lambda: data[:at],
            lambda: data[:at] + data[max(0, at - self.length) : at] * 2 + data[at:],
            lambda: data[:at] + bytes(b ^ (1 << self.length % 8) for b in data[at : at + 1]) + data[at + 1 :],
        )
        return ways[self.kind % len(ways)]()

    def of_json(self, whole: Any) -> Any:
        """The JSON value with the change."""
        whole = copy.deepcopy(whole)
        if not isinstance(whole, dict | list) or not whole:
            return whole
        holder, key = _spot(whole, self.at, 1 + self.kind // 6)
        leaf = copy.deepcopy(LEAVES[self.length % len(LEAVES)])
        other, name = _spot(whole, (self.length * 0.618) % 1, 1 + self.length % 6)
        taken = copy.deepcopy(other[name])
        match self.kind % 6:
            case 0 | 1 | 2:
                holder[key] = leaf
            case 3:
                del holder[key]
            case 4:
                holder[key] = taken
            case 5 if isinstance(holder, dict):
                holder[str(self.length)] = leaf
            case _:
                holder.insert(key, leaf)
        return whole


def _spot(value: Any, at: float, depth: int) -> tuple[Any, Any]:
    """A place inside a JSON value that can be set, so deep at most: `at` chooses the way, each branch alike."""
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        chosen, at = divmod(at * len(keys), 1)
        key = keys[int(chosen) % len(keys)]
        depth -= 1
        if not depth or not isinstance(value[key], dict | list) or not value[key]:
            return value, key
        value = value[key]


def inputs(parser: Parser, changes: int = 3) -> st.SearchStrategy[bytes]:
    """Sound inputs, sound ones with a few changes (of bytes, and of JSON values where they are JSON), any bytes."""
    pieces = st.binary(max_size=4) | st.sampled_from([*PIECES, *parser.pieces])
    edit = st.builds(Edit, st.integers(0, 41), st.floats(0, 1, exclude_max=True), st.integers(0, 999), pieces)
    edits = st.lists(edit, min_size=1, max_size=changes)
    if not parser.sound:
        return st.binary(max_size=200)
    seed = st.sampled_from(parser.sound)
    changed = st.builds(lambda data, each: functools.reduce(lambda d, e: e.of_bytes(d), each, data), seed, edits)
    if not parser.is_json:
        return changed | seed | st.binary(max_size=200)
    spoilt = st.builds(
        lambda data, each: functools.reduce(lambda d, e: e.of_json(d), each, json.loads(data)), seed, edits
    )
    return spoilt.map(_dumped) | changed | spoilt.map(_dumped) | st.binary(max_size=200)


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _module(name: str) -> Any:
    """A package that may be absent."""
    try:
        return __import__(name)
    except ImportError:
        return None


def change_of(parser: Parser, data: bytes, seed: int) -> bytes | None:
    """One change by the grammar, for a fuzzer that has changes of its own: None leaves it to these."""
    chance = random.Random(seed)
    piece = chance.choice([*PIECES, *parser.pieces])
    edit = Edit(chance.randrange(42), chance.random(), chance.randrange(1000), piece)
    if chance.random() < 0.2:
        return None
    if parser.is_json and chance.random() < 0.8:
        with suppress(ValueError, RecursionError):
            return _dumped(edit.of_json(json.loads(data)))
    return edit.of_bytes(data)


def chances(parser: Parser, rounds: int) -> Iterator[bytes]:
    """Changed inputs without hypothesis, the same every time, for a first corpus of another fuzzer."""
    for data, k in itertools.product(parser.sound, range(rounds)):
        yield Edit(k, (k * 0.618) % 1, k * 7, PIECES[k % len(PIECES)]).of_bytes(data)

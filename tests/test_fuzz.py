"""Every reader of files and text, given corrupted input, returns the written value or raises a `BNetError`.

A corrupted input never runs a program, imports a module that it names, or hangs. Errors found in this way have tests
below.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from safetensors.torch import load as load_bytes, save as save_bytes

import bnet_transformer as bt
from bnet_transformer._core.tokens import Tokenizer
from bnet_transformer.cli.io import TextSource
from bnet_transformer.cli.learning import read_examples
from bnet_transformer.data.dataset import map_tokens
from bnet_transformer.declare import io as store
from bnet_transformer.learning.fit import result as _  # noqa: F401  # `bt.load` imports it, which executes code
from tests.file_helpers import assert_same

# guarded execution

CANARY = "fuzz_canary"  # a module that must not be imported
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class")
FORBIDDEN += ("socket.connect", "socket.getaddrinfo", "marshal.loads", "webbrowser.open")
_audit = threading.local()


class Executed(BaseException):
    """An input made the library run a program, import a named module, or use the network."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_audit, "on", False):
        return
    if event in FORBIDDEN or (event == "import" and str(arguments[0]).split(".")[0] == CANARY):
        raise Executed(f"{event}: {arguments!r:.200}")


@functools.cache
def _install() -> None:
    sys.addaudithook(_hook)  # for the life of the process: a hook cannot be removed


@contextmanager
def forbid_execution() -> Iterator[None]:
    """Within this context, running a program or a pickle, importing the canary, and using the network are errors."""
    _install()
    _audit.on = True
    try:
        yield
    finally:
        _audit.on = False


def check_refused(read: Callable[[], object], message: str = "", kind: type[bt.BNetError] = bt.BNetError) -> None:
    """Assert that a call raises one error, whose message matches."""
    with pytest.raises(kind, match=message) as error:
        read()
    assert len(str(error.value)) < 1000


# small files of each kind


@functools.cache
def tiny_net() -> bt.BNet:
    return bt.bayesuvius(
        2, heads=2, key_dim=1, vocabulary=("the", "cat"), observe=bt.tpm.Categorical(2, labels=("n", "y"))
    )


def read_net(path: Path) -> None:
    """Read a file of a net, and write an equal file."""
    net = bt.load(path)
    assert_same(store.load(_put(path.with_name("again.safetensors"), store.to_bytes(net.network))), net.network)


def _put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def read_header(path: Path) -> None:
    """Read a net with this JSON as header, and a matching hash."""
    net_bytes = store.to_bytes(tiny_net().network)
    tensors = load_bytes(net_bytes)
    try:
        header = json.loads(path.read_bytes())
    except ValueError:
        return  # no header could be written
    with suppress(Exception):
        header["sha256"] = store._compute_sha256(header, tensors)
    read_net(_put(path, save_bytes(tensors, {store.METADATA_KEY: json.dumps(header)})))


def make_headers() -> list[bytes]:
    nets = (
        tiny_net(),
        bt.encoder_decoder(4, heads=2, slices=1, vocabulary=["a", "b"]),
        bt.geometric(2),
        bt.recurrent(2),
    )
    return [store._serialize(item.network)[1][store.METADATA_KEY].encode() for item in nets]


GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 4, "n_embd": 4, "n_layer": 1}
GPT2 |= {"n_head": 2, "n_positions": 5, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}


@functools.cache
def make_weights() -> dict[str, torch.Tensor]:
    """The tensors of a small GPT-2."""
    shapes = {"wte.weight": (4, 4), "wpe.weight": (5, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    inner = {"ln_1": (4,), "ln_2": (4,), "attn.c_attn": (4, 12), "attn.c_proj": (4, 4)}
    inner |= {"mlp.c_fc": (4, 16), "mlp.c_proj": (16, 4)}
    shapes |= {f"h.0.{name}.weight": shape for name, shape in inner.items()}
    shapes |= {f"h.0.{name}.bias": shape[-1:] for name, shape in inner.items()}
    return {f"transformer.{name}": torch.full(shape, 0.5) for name, shape in shapes.items()}


def read_folder(path: Path, name: str, holding: str = "model.safetensors") -> None:
    """Read a folder of Hugging Face in which one file is corrupted."""
    folder = path.parent / name.replace(".", "_")
    _put(folder / "config.json", json.dumps(GPT2).encode())
    _put(folder / holding, save_bytes(make_weights()))
    bt.from_pretrained(str(_put(folder / name, path.read_bytes()).parent))


def make_configs() -> list[bytes]:
    base = {"vocab_size": 4, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 3}
    base |= {"max_position_embeddings": 8, "num_key_value_heads": 1, "id2label": {"0": "a", "1": "b"}}
    kinds = ("bert", "albert", "roberta", "mpnet", "gpt_neox", "mistral", "qwen2", "llama", "vit")
    return [json.dumps(item).encode() for item in (GPT2, *({**base, "model_type": kind} for kind in kinds))]


def make_tokenizers() -> list[bytes]:
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "the": 3, "cat": 4, "##s": 5, "s": 6, "a": 7, "c": 8, "t": 9}
    pieces = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocab}
    merges = {"type": "BPE", "unk_token": "[UNK]", "vocab": vocab | {"ca": 10}, "merges": [["c", "a"]]}
    models = [pieces | {"max_input_chars_per_word": 100}, merges | {"dropout": None, "fuse_unk": False}]
    models += [{"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": False}]
    models += [{"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}]
    base = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    return [json.dumps({**base, "model": model}).encode() for model in models]


def read_tokenizer(path: Path) -> None:
    reader = Tokenizer(path.read_bytes().decode("utf-8", "replace"))
    for text in ("the cats sat", ["the", "cats"], "aé中 x"):
        with suppress(bt.BNetError):
            _check_encoding(reader, text)


def _check_encoding(reader: Tokenizer, text: str | list[str]) -> None:
    """Check that there is one entry for each token, that groups partition the tokens, and that spans are inside the
    text."""
    result, length = reader.encode(text), len(text if isinstance(text, str) else " ".join(text))
    assert len({len(f) for f in (result.tokens, result.ids, result.spans, result.special, result.segments)}) == 1
    assert [k for group in result.groups for k in group] == list(range(len(result.ids)))
    assert all(span is None or 0 <= span[0] <= span[1] <= length for span in result.spans)


def read_hdf5(path: Path) -> None:
    """Read a parameter file of GeometricMachineLearning.jl."""
    assert all(bool(value.isfinite().all()) for value in bt.load_geometric(path).parameters.values())


def make_hdf5() -> list[bytes]:
    h5py, buffer = pytest.importorskip("h5py"), io.BytesIO()
    with h5py.File(buffer, "w") as file:
        for role in ("PQ", "PK", "PV"):
            file[f"L1/{role}/head_1"] = np.eye(2)
        for k in (2, 3):
            file[f"L{k}/weight"], file[f"L{k}/bias"] = np.eye(2), np.zeros(2)
    return [buffer.getvalue()]


def make_token_streams() -> list[bytes]:
    result = []
    for save in (np.save, np.savez):
        buffer = io.BytesIO()
        save(buffer, np.arange(5))
        result.append(buffer.getvalue())
    return result


def read_lines(path: Path) -> None:
    examples = read_examples(TextSource((), str(path)))
    assert examples.texts and all(examples.texts)


@dataclass(frozen=True)
class Parser:
    """A reader of files, valid files, whether they are JSON, and whether valid ones may raise an error."""

    read: Callable[[Path], object]
    seeds: Callable[[], Sequence[bytes]]
    is_json: bool = False
    may_refuse: bool = False


PARSERS = {
    "net": Parser(read_net, lambda: [store.to_bytes(tiny_net().network)]),
    "header of a net": Parser(read_header, make_headers, is_json=True, may_refuse=True),
    "config.json": Parser(lambda path: read_folder(path, "config.json"), make_configs, is_json=True, may_refuse=True),
    "weights": Parser(lambda path: read_folder(path, "model.safetensors"), lambda: [save_bytes(make_weights())]),
    "index of weights": Parser(
        lambda path: read_folder(path, "model.safetensors.index.json", "part.safetensors"),
        lambda: [json.dumps({"weight_map": dict.fromkeys(make_weights(), "part.safetensors")}).encode()],
        is_json=True,
    ),
    "tokenizer.json": Parser(read_tokenizer, make_tokenizers, is_json=True),
    "HDF5": Parser(read_hdf5, make_hdf5),
    "token stream": Parser(
        lambda path: map_tokens(path.rename(path.with_suffix(".npy"))), make_token_streams, may_refuse=True
    ),
    "file of sentences": Parser(read_lines, lambda: [b"the cat sat\nthe dog\n", b"\xef\xbb\xbfthe cat\tyes\n"]),
}

# corruption

PIECES = [b"null", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'"\\ud800"', b"\\u0000", b"../", b"{0.__class__}", b"%s"]
PIECES += [b"os:system", b'{"class": "fuzz_canary:Thing"}', b"[" * 3000, b"9" * 5000, b"\xff\xfe", "ſ²٣\u202e".encode()]
LEAVES = [None, True, 0, -1, 2**63, 10**30, 0.5, float("inf"), float("nan"), "", "\ud800", "../x", "fuzz_canary:Thing"]
LEAVES += [[], {}, [None], {"class": "Add"}, {"class": "fuzz_canary:Thing"}, {"dict": [[[], 1]]}, [0] * 500, "a" * 5000]


def corrupt_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with a piece inserted, removed or replaced, or truncated."""
    at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 40))
    piece = draw(st.sampled_from(PIECES) | st.binary(max_size=8))
    return draw(st.sampled_from([data[:at], data[:at] + piece + data[at:], data[:at] + piece + data[at + length :]]))


def corrupt_json(draw: st.DrawFn, data: bytes) -> bytes:
    """The JSON with one value replaced or removed."""
    document = json.loads(data)
    parent, key = None, None
    value = document
    while isinstance(value, dict | list) and value and (parent is None or draw(st.booleans())):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        parent, key = value, draw(st.sampled_from(keys))
        value = parent[key]
    if draw(st.integers(0, 3)):
        parent[key] = copy.deepcopy(draw(st.sampled_from(LEAVES)))
    else:
        del parent[key]
    return json.dumps(document).encode()


@st.composite
def corrupted_inputs(draw: st.DrawFn, parser: Parser, valid: Sequence[bytes]) -> bytes:
    """A valid input, corrupted once or twice."""
    data = draw(st.sampled_from(valid))
    if parser.is_json and draw(st.integers(0, 3)):
        return corrupt_json(draw, data)
    return corrupt_bytes(draw, corrupt_bytes(draw, data) if draw(st.booleans()) else data)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.filterwarnings("ignore")
def test_a_spoilt_input_is_refused_or_read(name: str, tmp_path: Path) -> None:
    if name == "tokenizer.json":
        pytest.importorskip("tokenizers")
    parser = PARSERS[name]
    valid = parser.seeds()
    for data in valid:  # imports of the first call do not depend on the input
        with suppress(bt.BNetError) if parser.may_refuse else nullcontext():
            parser.read(_put(tmp_path / "input", data))

    @settings(
        max_examples=25, derandomize=True, database=None, deadline=10_000,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(corrupted_inputs(parser, valid))
    def run(data: bytes) -> None:
        try:
            with forbid_execution():
                parser.read(_put(tmp_path / "input", data))
        except bt.BNetError as error:
            assert 0 < len(str(error)) < 20_000

    run()


def test_forbidden_operations_are_detected() -> None:
    for code in ("os.system('true')", "subprocess.Popen(['true'])", "pickle.loads(b'cos\\nsystem\\n(Vtrue\\ntR.')"):
        with pytest.raises(Executed), forbid_execution():
            exec(f"import os, pickle, subprocess\n{code}")
    with pytest.raises(Executed), forbid_execution():
        __import__(CANARY)


# errors that were found


def test_an_archive_or_a_broken_header_is_no_array_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(5))
    content_ = path.read_bytes()
    corrupted = [content_.replace(old, new) for old, new in ((b"}", b"("), (b"(5,)", b"(-5)"), (b"<i8", b"|O8"))]
    for content in (*corrupted, make_token_streams()[1], b"PK\x03\x04"):
        check_refused(lambda content=content: map_tokens(_put(path, content)), "tokens", bt.FileError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": {"a": 1}}, "activation_function"),
        ({"n_layer": 10**30}, "n_layer"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"id2label": {"9" * 5000: "a"}}, "labels"),
    ],
)
def test_a_config_that_no_model_has(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = _put(tmp_path / "input", json.dumps({**GPT2, **change}).encode())
    check_refused(lambda: read_folder(path, "config.json"), message)


@pytest.mark.parametrize("part", [["a"], {"a": 1}, None, "x" * 5000, "a\0b", "\ud800"])
def test_an_index_that_names_no_file(part: object, tmp_path: Path) -> None:
    path = _put(tmp_path / "input", json.dumps({"weight_map": dict.fromkeys(make_weights(), part)}).encode())
    check_refused(lambda: read_folder(path, "model.safetensors.index.json", "part.safetensors"), "weight", bt.FileError)


@pytest.mark.parametrize("path", ["os.system", "bt.tpm.Linear", "dataclasses.dataclass", "nothing"])
def test_trust_in_a_module_does_not_extend_to_its_imports(path: str, tmp_path: Path) -> None:
    """An earlier version followed a path through the names of a trusted module, and created the object there."""
    header = json.loads(make_headers()[0])
    header["declaration"]["stacks"][0]["slice"][0]["tpm"]["class"] = f"{__name__}:{path}"
    header["sha256"] = store._compute_sha256(header, load_bytes(store.to_bytes(tiny_net().network)))
    tensors = load_bytes(store.to_bytes(tiny_net().network))
    path_ = _put(tmp_path / "net.safetensors", save_bytes(tensors, {store.METADATA_KEY: json.dumps(header)}))
    with forbid_execution():
        check_refused(lambda: bt.load(path_, trust=(__name__,)), "net.safetensors", bt.FileError)


def test_numbers_of_a_julia_file_are_read_only_from_it(tmp_path: Path) -> None:
    """An earlier version waited for a width in a pipe."""
    h5py, path = pytest.importorskip("h5py"), tmp_path / "net.h5"
    with h5py.File(path, "w") as file:
        file["L1/A/S"] = np.ones(1)
        file.create_dataset("L1/A/n", shape=[1], dtype="i8", external=[(str(_put(tmp_path / "other", bytes(8))), 0, 8)])
    check_refused(lambda: bt.load_geometric(path), "in the file itself", bt.FileError)

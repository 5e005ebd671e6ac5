"""Every parser as a target `target(data: bytes)`, with sound inputs to begin with, and how these are spoilt.

A target ends in peace (the input was refused with a `BNetError`, or its value went out and came back the same), or it
raises: that is a fault. Hypothesis draws inputs by `inputs`; any other fuzzer of bytes takes the same targets.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner
from hypothesis import strategies as st
from safetensors.torch import save as save_bytes

import bnet_transformer as bt
from bnet_transformer import axes, files
from bnet_transformer.cli import main, shared
from bnet_transformer.export.text import from_json, to_json
from bnet_transformer.files import plain, store
from bnet_transformer.inference.surgery import matching
from bnet_transformer.pretrained import from_hugging_face, from_lens, to_hugging_face, to_lens
from bnet_transformer.tokens import Tokenizer
from bnet_transformer.training import checkpoint, kept
from bnet_transformer.training.words import tokens_of
from tests.keeping import same

SECONDS = 10.0  # as long as one input may take, on a busy machine
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
    """What takes longer is interrupted by an error, where signals are told (POSIX, the main thread)."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
        guard = nullcontext() if self.runs_programs or not self._warm else watched()
        with warnings.catch_warnings(), within(SECONDS), guard:
            warnings.simplefilter("ignore")
            try:
                self.read(data)
            except bt.BNetError as error:
                assert 0 < len(str(error)) < LONGEST, f"an error of {len(str(error))} letters"

    @functools.cached_property
    def _warm(self) -> bool:
        """True once sound inputs were read: what libraries compile of their own for their first call is there."""
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


def _rebuilt(data: bytes) -> Path:
    """A file with a head and tensors as JSON tells them, and the hash of both: only what they say can be wrong."""
    try:
        told = json.loads(data)
        tensors = {
            name: torch.tensor(values, dtype=torch.float64).to(DTYPES[dtype]).reshape(shape)
            for name, (dtype, shape, values) in told["tensors"].items()
        }
        return _written(told["head"], tensors)
    except Exception as error:  # no input of this kind
        raise bt.BNetError("an input", expected="a head and tensors", got=type(error).__name__) from error


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
    bt.train(trainee(), ["the cat"], steps=3, folder=path.parent, resume=True, progress=False)


def seeds_checkpoint() -> list[bytes]:
    """The checkpoint of a run of a step."""
    folder = place() / "began"
    bt.train(trainee(), ["the cat"], steps=2, folder=folder, resume=folder.exists(), every=1, progress=False)
    return [_told(folder / checkpoint.NAME)]


def read_fit(data: bytes) -> None:
    """A file of a fit."""
    found = bt.load(_rebuilt(data))
    found.save(place() / "again.fit")


def seeds_fit() -> list[bytes]:
    """Fits of two methods."""
    small = bt.bayesuvius(2, heads=2, key_dim=1, observe=bt.tpm.Normal(0.5))
    x = torch.ones(2, 2, 2)
    path, found = place() / "began.fit", []
    for options in ({"method": "em"}, {"method": "nuts", "chains": 1, "warmup": 1, "draws": 2, "learn": ("c.logits",)}):
        steps = {} if "chains" in options else {"steps": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bt.fit(small, (x, x), progress=False, **options, **steps).save(path)
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
    """The vocabulary files of a folder: `name`, a line feed and the content of each, parted by NUL."""
    from bnet_transformer.pretrained.vocabulary import folder_tokenizer

    folder = place() / "vocabulary"
    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "merges.txt", "vocab.json"):
        (folder / name).unlink(missing_ok=True)
    folder.mkdir(exist_ok=True)
    for part in data.split(b"\0"):
        name, _, content = part.partition(b"\n")
        if name in (b"vocab.txt", b"tokenizer_config.json", b"special_tokens_map.json", b"merges.txt", b"vocab.json"):
            put(f"vocabulary/{name.decode()}", content)
    text = folder_tokenizer(folder)
    if text is not None:
        read_tokenizer(text.encode())


SEEDS_VOCABULARY = [
    b'vocab.txt\n[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n##s\0tokenizer_config.json\n{"do_lower_case": true}',
    b'vocab.json\n{"<s>": 0, "</s>": 1, "t": 2, "h": 3, "th": 4}\0merges.txt\n#version: 0.2\nt h\n'
    b'\0special_tokens_map.json\n{"mask_token": {"content": "<mask>"}}',
    b'vocab.json\n{"<|endoftext|>": 0, "t": 1}\0merges.txt\n',
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
    found = tokens_of(put("tokens.npy" if data[:1] == b"n" else "tokens.bin", data[1:]))
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
    _answered(lambda: shared.numbers("--slices", told))
    _answered(lambda: shared.words(told, ()))
    _answered(lambda: shared.states("--metric", told))
    found = _answered(lambda: shared.names("NODE", told))
    assert found is None or shared.names("NODE", ",".join(found)) == found  # type: ignore[arg-type]


SEEDS_SPEC = [b"c=1", b'y_2="7"', b"x_0_1=1.5,2", b"q_0_*=zero", b"y_1=cat,dog", b"0,1", b"enc=20,dec=30", b"1e400"]

SLOW = ("bench", "explore", "heads")  # programs of their own, a browser, minutes
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
        ("models",),
        ("completion", "bash"),
        ("--version",),
        ("ask", "--help"),
    ]
    return ["\0".join(each).encode() for each in asked]


def read_lines(data: bytes) -> None:
    """A file of sentences."""
    from bnet_transformer.cli.lines import lines_of

    found = lines_of((), str(put("lines.txt", data)))
    assert found.texts and all(found.texts)
    for observed in ("next", "words", "label"):
        _answered(lambda observed=observed: found.pairs(found.observed(observed)))


SEEDS_LINES = [b"the cat sat\nthe dog\n", b"the cat\tn y\nthe dog\ty n\n", b"\xef\xbb\xbfthe cat\tyes\n"]

PIECES = [b"null", b"true", b"-1", b"1e999", b"NaN", b"Infinity", b"[]", b"{}", b'""', b'"\\ud800"', b"\\u0000", b"../"]
PIECES += [b"{0.__class__}", b"%s", b"os:system", b"fuzz_canary:Thing", b'{"class": "fuzz_canary:Thing"}', b"[" * 3000]
PIECES += [b"9" * 5000, b"99999999999999999999", b"\xff\xfe", b"\xed\xa0\x80", "ſ²٣\u202e".encode(), b"\0"]
CLASSES = (b'"class"', b'"Linear"', b'"bnet_transformer.models._x:X"')
NAMES = [b"_0", b"_1", b"*", b"[0]", b"[:, 0]", b".", b" -> ", b"_00", b"_-1", b"x", b"enc_", b"_" * 40, "_٣".encode()]


def all_parsers() -> dict[str, Parser]:
    """Every parser, by name."""
    cars = ["--json", "--do", "--given", "-m", "tiny", "-o", "a.svg", "a.csv", "--pair", "--top", "-f", "-", "--", "\0"]
    known = [
        Parser("net file", read_net, seeds_net),
        Parser("declaration", read_declaration, seeds_declaration, True, CLASSES),
        Parser("checkpoint", read_checkpoint, seeds_checkpoint, True),
        Parser("fit file", read_fit, seeds_fit, True),
        Parser("HDF5", read_hdf5, seeds_hdf5),
        Parser("config.json", read_config, lambda: [json.dumps(each).encode() for each in (GPT2, LLAMA)], True),
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


def chances(parser: Parser, rounds: int) -> Iterator[bytes]:
    """Changed inputs without hypothesis, the same every time, for a first corpus of another fuzzer."""
    for data, k in itertools.product(parser.sound, range(rounds)):
        yield Edit(k, (k * 0.618) % 1, k * 7, PIECES[k % len(PIECES)]).of_bytes(data)

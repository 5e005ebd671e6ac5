"""Every parser, fed with what is spoilt: a value that goes out and comes back, or one clear refusal.

The long run is `python -m tests.soak fuzz`; what it found stands here by name.
"""

from __future__ import annotations

import importlib
import io
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import bnet_transformer as bt
from bnet_transformer import files
from bnet_transformer._core.tokenizer import Tokenizer
from bnet_transformer.data.arrays import map_tokens
from bnet_transformer.files import checkpoint
from bnet_transformer.pretrained.vocabulary import folder_tokenizer
from tests import flat_options, fuzzing
from tests.soak.fuzz import NEEDS

PARSERS = fuzzing.all_parsers()
SLOW = {
    "checkpoint",
    "checkpoint of a fit",
    "command line",
    "fit file",
    "name",
    "safetensors header",
    "widget's message",
}
REFUSED = {
    "token stream",
    "class of a stranger",
    "config.json",
    "parts of HDF5",
    "vocabulary files",
}  # some of their own


@pytest.mark.parametrize("name", PARSERS)
def test_a_spoilt_input_is_refused_or_read(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    parser = PARSERS[name]

    @settings(
        max_examples=12 if name in SLOW else 40, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(fuzzing.inputs(parser))
    def run(data: bytes) -> None:
        parser.target(data)

    run()


@pytest.mark.parametrize("name", PARSERS)
def test_sound_inputs_are_read(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    for data in PARSERS[name].sound if name not in SLOW else PARSERS[name].sound[:3]:
        with suppress(bt.BNetError) if name in REFUSED else nullcontext():
            PARSERS[name].read(data)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=9), st.data())
@settings(max_examples=30, derandomize=True, database=None)
def test_a_change_of_json_is_json(value: Any, data: st.DataObject) -> None:
    edit = data.draw(st.builds(fuzzing.Edit, st.integers(0, 41), st.floats(0, 1, exclude_max=True), st.integers(0, 99)))
    json.loads(json.dumps(edit.of_json(value)))


# the guards themselves


@pytest.mark.parametrize(
    "code",
    [
        "exec('1')",
        "eval(compile('1', 'x', 'eval'))",
        "__import__('os').system('true')",
        "__import__('subprocess').Popen(['true'])",
        "__import__('pickle').loads(b'cos\\nsystem\\n(Vtrue\\ntR.')",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
        "__import__('fuzz_canary')",
    ],
)
def test_what_is_forbidden_is_seen(code: str) -> None:
    for module in ("os", "pickle", "socket", "subprocess"):
        importlib.import_module(module)
    run = eval(f"lambda: {code}")
    with pytest.raises(fuzzing.Executed), fuzzing.watched():
        run()


def test_a_hang_is_interrupted() -> None:
    with pytest.raises(TimeoutError, match="of the processor"), fuzzing.within(0.05):
        while True:
            pass
    with pytest.raises(TimeoutError, match="by the clock"), fuzzing.within(0.01):
        time.sleep(60)


def test_what_is_imported_for_a_first_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line once failed on nothing at all, on a busy machine: its imports were counted."""
    timed: list[bool] = []

    @contextmanager
    def within(_: float) -> Iterator[None]:
        timed.append(True)
        yield
        timed.pop()

    read: list[tuple[bytes, bool]] = []
    parser = fuzzing.Parser(
        "any", lambda data: read.append((data, bool(timed))), lambda: [b"sound"], runs_programs=True
    )
    monkeypatch.setattr(fuzzing, "within", within)
    parser.target(b"")
    assert read == [(b"sound", False), (b"", True)]


# what was found


def refused(read: Callable[[], object], told: str, kind: type[bt.BNetError] = bt.BNetError) -> None:
    """One clear refusal that says so much."""
    with pytest.raises(kind, match=told) as error:
        read()
    assert len(str(error.value)) < 1000


def test_an_archive_that_says_it_is_an_array_of_tokens(tmp_path: Any) -> None:
    path = tmp_path / "tokens.npy"
    np.savez(io.BytesIO(), np.arange(5))
    with path.open("wb") as file:
        np.savez(file, np.arange(5))
    for content in (path.read_bytes(), b"PK\x03\x04", b"PK\x03\x04" + b"\0" * 99):
        path.write_bytes(content)
        refused(lambda: map_tokens(path), "a file of tokens", bt.FileError)


def test_a_header_of_an_array_that_is_no_python(tmp_path: Any) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(5))
    whole = path.read_bytes()
    for old, new in ((b"}", b"("), (b"(5,)", b"(-5)"), (b"<i8", b"|O8"), (b"(5,)", b"9**9")):
        path.write_bytes(whole.replace(old, new))
        refused(lambda: map_tokens(path), "a file of tokens", bt.FileError)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"activation_function": {"a": 1}}, "activation_function"),
        ({"n_layer": 10**30}, "n_layer of the config: expected a whole number of at most 1024"),
        ({"vocab_size": 10**30}, "vocab_size of the config: expected a whole number of at most"),
        ({"id2label": {"9" * 5000: "a"}}, "labels for 0, 1, 2"),
    ],
)
def test_a_config_that_no_model_has(change: dict[str, Any], told: str) -> None:
    refused(lambda: fuzzing.read_config(json.dumps({**fuzzing.GPT2, **change}).encode()), told)


@pytest.mark.parametrize("types", [7, "full_attention", [["full_attention"]], {"a": 1}])
def test_types_of_slices_that_are_no_list_of_names(types: object) -> None:
    from bnet_transformer.pretrained.config import config_to_reach

    refused(lambda: config_to_reach(types, None, 0, 2), "layer_types of the config")  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [["a"], {"a": 1}, None, "x" * 5000, "a\0b", "\ud800"])
def test_an_index_that_names_no_file(part: object) -> None:
    told = json.dumps({"weight_map": dict.fromkeys(fuzzing.weights("gpt2"), part)}).encode()
    refused(lambda: fuzzing.read_index(told), "weight_map|the weights", bt.FileError)


def test_half_of_a_character_is_no_text() -> None:
    pytest.importorskip("tokenizers")
    reader = fuzzing.readers()[0]
    for said in ("the \ud800", ["the", "\udcff"]):
        refused(lambda said=said: reader.read(said), "text in Unicode; got half of a character")  # type: ignore[misc]
    refused(lambda: reader.read("the", "\ud800"), "pair: expected text in Unicode")


def test_a_word_that_a_vocabulary_without_an_unknown_token_lacks(tmp_path: Any) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\n[MASK]\nthe\n", encoding="utf-8")
    text = folder_tokenizer(tmp_path)
    assert text is not None and Tokenizer(text).read("the").tokens == ("[CLS]", "the", "[SEP]")
    refused(lambda: Tokenizer(text).read("a dog"), "text that its tokenizer reads; got WordPiece error")


def test_the_work_of_a_list_of_words_is_linear() -> None:
    """Which word a token is of was once looked for among all words anew; counted here, not timed."""
    pytest.importorskip("tokenizers")

    class Counted(list[int]):
        asked = 0

        def __getitem__(self, at: Any) -> Any:
            Counted.asked += 1
            return super().__getitem__(at)

    from bnet_transformer._core.tokenizer import _entry

    ends = Counted(range(4, 40_004, 4))
    assert [_entry(ends, (at, at + 3)) for at in (0, 3, 4, 20_000, 39_999, 50_000)] == [0, 0, 1, 5000, 9999, 9999]
    assert Counted.asked < 6 * 20


BEGUN = PARSERS["checkpoint"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda told: told["head"].pop("step"),
        lambda told: told["head"].update(step="two"),
        lambda told: told["head"].update(step=-5),
        lambda told: told["head"].pop("settings"),
        lambda told: told["head"].update(settings="same"),
        lambda told: told["tensors"].pop("losses"),
        lambda told: told["tensors"].update(held_out=["F64", [3], [0, 0, 0]]),
        lambda told: told["tensors"].pop("count/W_embed.value"),
        lambda told: told["tensors"].update({"first/W_embed.value": ["F64", [1], [1]]}),
        lambda told: told["tensors"].update({"second/nobody.value": ["F32", [1], [1]]}),
        lambda told: told["tensors"].update({"best/W_embed.value": ["I64", [3, 4], [1] * 12]}),
    ],
)  # fmt: skip
def test_a_checkpoint_with_a_true_hash_and_a_false_content(spoil: Callable[[dict[str, Any]], object]) -> None:
    told = json.loads(BEGUN.sound[0])
    spoil(told)
    refused(lambda: BEGUN.read(json.dumps(told).encode()), "a checkpoint of train", bt.FileError)


@pytest.mark.parametrize(
    "name",
    [
        "fuzz_friend:os.system",
        "fuzz_friend:bt.tpm.Linear",
        "fuzz_friend:dataclasses.dataclass",
        "fuzz_friend:Other",
        "fuzz_friend:nothing",
        "bnet_transformer.models.encoder:Node",
        "bnet_transformer.models.encoder:torch.hub",
    ],
)
def test_who_trusts_a_module_trusts_none_that_it_imports(name: str) -> None:
    """A path was once followed through whatever a trusted module holds, and what stood there was made."""
    fuzzing.friend()
    head = json.loads(fuzzing.seeds_declaration()[0])
    head["declaration"]["stacks"][0]["slice"][0]["tpm"]["class"] = name
    with fuzzing.watched():
        refused(
            lambda: fuzzing._of_header(Path("net.safetensors"), head, ("fuzz_friend",)), "net.safetensors", bt.FileError
        )


def parts(told: dict[str, Any]) -> bytes:
    """Parts of an HDF5 file, as `fuzzing.read_groups` takes them."""
    return json.dumps({"parts": told, "says": {}}).encode()


def test_a_width_that_lies_in_another_file() -> None:
    """It was read from there: of a pipe it waited for ever."""
    pytest.importorskip("h5py")
    where = fuzzing.put("other", b"\2" + bytes(7))
    told = {"L1/A/S": ["f8", [1], [1.0]], "L1/A/n": ["elsewhere", [1], str(where)]}
    refused(lambda: fuzzing.read_groups(parts(told)), "L1/A/n: expected numbers in the file itself", bt.FileError)


def test_a_short_file_of_many_numbers() -> None:
    """Nobody wrote them, or they have many names: all of them were more than any memory."""
    pytest.importorskip("h5py")
    one = {"L1/PQ/head_1": ["f8", [500, 1000], None]}
    often = {f"L1/P{role}/head_{k}": ["hard", [], "/L1/PQ/head_1"] for role in "QKV" for k in range(1, 9)}
    told = {**one, **{name: each for name, each in often.items() if name not in one}}
    refused(lambda: fuzzing.read_groups(parts(told)), "at most 1024 times the bytes of the file", bt.FileError)


def test_half_of_a_character_in_an_error_is_told_by_its_code() -> None:
    assert str(bt.BNetError("type", expected="one", got="a\udcff")) == r"type: expected one; got 'a\udcff'"


def test_a_tokenizer_that_panics_is_refused():
    """Found by atheris: a panic of Rust is no Exception of Python."""

    class PanicException(BaseException):
        pass

    class Panics:
        def encode(self, *texts):
            raise (KeyboardInterrupt if texts == ("stop",) else PanicException)("range end index out of range")

    reader = Tokenizer("{}")
    reader.__dict__["_tokenizer"] = Panics()
    with pytest.raises(bt.BNetError, match="sentence: expected text that its tokenizer reads; got range end"):
        reader.read("the cats sat")
    with pytest.raises(KeyboardInterrupt):
        reader.read("stop")


@pytest.mark.parametrize(
    "part", ["all", "first", "second", "best", "who", "z", "drawn", "mass", "random/0", "told", "numbers"]
)
def test_a_checkpoint_of_other_parameters_is_no_fit_to_go_on_from(part, tmp_path):
    """Found by atheris: names, shapes and numbers within a file that is signed anew."""
    small, sentences = fuzzing.fitted()
    by_map = part in ("all", "first", "second", "best", "who")
    way = {"method": "map", "steps": 2} if by_map else fuzzing.CHAINS
    asked = {**way, "every": 1, "folder": tmp_path, "progress": False}
    flat_options.fit(small, sentences, **asked)
    path = tmp_path / checkpoint.NAME
    head, tensors = files.read_tensors(path, "a checkpoint", checkpoint.FORMAT, checkpoint.VERSION)
    name = next(each for each in tensors if each.removeprefix("story/" if by_map else "0/").startswith(part))
    if part == "who":
        tensors[name] = tensors[name] + 7
    elif part == "random/0":
        tensors[name] = torch.zeros_like(tensors[name])
    elif part in ("first", "mass", "told", "numbers"):
        tensors[name] = tensors[name].reshape(-1).repeat(3)
    else:
        tensors[f"{name}{{}}"] = tensors.pop(name)
    files.write_tensors(path, head, tensors)
    with pytest.raises(bt.FileError, match="expected a checkpoint"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat_options.fit(small, sentences, resume=True, **asked)

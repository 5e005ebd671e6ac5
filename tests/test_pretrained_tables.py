"""Word tables of T5, BART and Marian: which of them a model uses, with transformers as the oracle."""

import itertools
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import bnet_transformer as bt
from bnet_transformer.pretrained import from_hugging_face, from_pretrained, to_hugging_face
from bnet_transformer.pretrained.weights import map_parameters
from tests.huggingface_models import BART, T5, D, T, init_model, set_config
from tests.test_pretrained_configs import check_logits

PREFIX = {"t5": "", "bart": "model.", "marian": "model."}
SLICES = {"encoder_layers": 1, "decoder_layers": 1}
KINDS = {
    "t5": ("T5ForConditionalGeneration", {**T5, "num_layers": 1, "num_decoder_layers": 1}),
    "bart": ("BartForConditionalGeneration", {**BART, **SLICES}),
    "marian": ("MarianMTModel", {**BART, **SLICES}),
}
SENTENCE = {"enc": [3, 4, 5, 6], "dec": [1, 7, 8]}
TABLES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
ALL = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("bart", "marian"))) for name in KINDS]
)


def table_key(name, table):
    return f"{'' if table == 'lm_head' else PREFIX[name]}{table}.weight"


def relabel(letters):
    """Return the same tables with the first letters of the alphabet, in their order; a dash is a missing table."""
    order = list(dict.fromkeys(letters.replace("-", "")))
    return "".join(letter if letter == "-" else "abcd"[order.index(letter)] for letter in letters)


# Which of the four tables are shared: a letter for each, in the order of TABLES.
PARTITIONS = sorted({relabel("".join(letters)) for letters in itertools.product("abcd", repeat=4)})


def make_tables(letters, dtype=torch.float32):
    """A table for each letter."""
    by_letter = {
        letter: torch.randn(13, 12, dtype=dtype, generator=torch.Generator().manual_seed(ord(letter)))
        for letter in set(letters) - {"-"}
    }
    return {table: by_letter[letter] for table, letter in zip(TABLES, letters, strict=True) if letter != "-"}


def test_all_partitions_are_there():
    assert len(PARTITIONS) == 15  # Bell's number of four


@ALL
def test_a_model_in_memory_has_the_tables_that_it_computes_with(name):
    """For any value of `shared`, which no stack reads; each partition with one family and one tie."""
    kind, options = KINDS[name]
    for tie in (True, False):
        model = init_model(kind, {**options, "tie_word_embeddings": tie})
        for letters in [*PARTITIONS[2 * list(KINDS).index(name) + tie :: 6], "abcd"]:
            check_tables(name, model, letters)


def check_tables(name, model, letters):
    """A net of a model whose tables are one where `letters` are."""
    parameters = {}
    for table, value in make_tables(letters, D).items():
        owner = model.get_submodule(table_key(name, table).removesuffix(".weight"))
        owner.weight = parameters.setdefault(letters[TABLES.index(table)], torch.nn.Parameter(value))
    net = from_pretrained(model)
    check_logits(net, model, SENTENCE, 1e-9)
    state = model.state_dict()
    views = {entry.name: entry.view for entry in map_parameters(net.network, bt.pretrained.FAMILIES[name])}
    for parameter, value in net.parameters.items():
        peer = to_hugging_face(net, parameter)
        assert views[parameter](state[peer]).equal(value), (letters, parameter)
        assert parameter in from_hugging_face(net, peer), (letters, parameter)


def test_set_input_embeddings_of_t5_does_not_change_its_stacks():
    """T5 sets only `shared`, which is not read until tables are tied again."""
    model = init_model(*KINDS["t5"])
    model.set_input_embeddings(torch.nn.Embedding(13, 12, dtype=D))
    check_logits(from_pretrained(model), model, SENTENCE, 1e-9)


def load_peer(name, folder):
    """Return the model that transformers reads from a folder, or None where necessary weights are missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = getattr(T, KINDS[name][0]).from_pretrained(folder, output_loading_info=True)
    missing = [key for key in report["missing_keys"] if "embed_positions" not in key and "shared" not in key]
    return None if missing else model.eval()


def is_ambiguous(letters):
    """Return whether `shared` and a used table are missing, and the existing tables differ."""
    return letters[0] == "-" and "-" in letters[1:] and len(set(letters) - {"-"}) > 1


CASES = sorted(
    {
        relabel("".join("-" if is_missing else letter for is_missing, letter in zip(mask, letters, strict=True)))
        for letters in PARTITIONS
        for mask in itertools.product([False, True], repeat=4)
    }
)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
def test_a_folder_has_the_tables_that_transformers_reads(part, tmp_path):
    """Every partition of the tables with every choice of missing tables, each with one family and one tie."""
    name, tie = list(itertools.product(KINDS, (True, False)))[part]
    kind, options = KINDS[name]
    model = init_model(kind, {**options, "tie_word_embeddings": tie}, torch.float32)
    model.save_pretrained(tmp_path)
    set_config(tmp_path, tie_word_embeddings=tie)
    base = load_file(tmp_path / "model.safetensors")
    base = {key: value for key, value in base.items() if key not in {table_key(name, table) for table in TABLES}}
    assert len(CASES) == 52
    for k, letters in enumerate(CASES[part::6]):
        tensors = {table_key(name, table): value.clone() for table, value in make_tables(letters).items()}
        write(tmp_path, {**base, **tensors}, sharded=k % 3 == 0)
        peer = None if letters == "----" else load_peer(name, tmp_path)
        if peer is None or ((tie or name == "t5") and is_ambiguous(letters)):  # a T5 is tied for any config
            with pytest.raises(bt.BNetError):
                from_pretrained(tmp_path)
        else:
            check_logits(from_pretrained(tmp_path), peer, SENTENCE)


def write(folder, tensors, *, sharded):
    """Weights in one file, or in one for each half with an index."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    index = {}
    for k in range(2):
        file_name = f"model-0000{k + 1}-of-00002.safetensors"
        shard = {key: value for j, (key, value) in enumerate(tensors.items()) if j % 2 == k}
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file_name)
    content = {"metadata": {"total_size": 0}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.slow
@pytest.mark.parametrize("tie", [True, False])
def test_stacks_with_a_vocabulary_each_have_tables_of_their_own(tie, tmp_path):
    """A Marian that shares no tables except, if its config ties them, the decoder's words and the logits."""
    options = {**BART, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 17, "tie_word_embeddings": tie}
    model = init_model("MarianMTModel", options)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(17, 12, dtype=D))
    check_logits(from_pretrained(model), model, SENTENCE, 1e-9)
    init_model("MarianMTModel", options, torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.decoder.embed_tokens.weight"].clone())
    for missing in (None, "lm_head", "model.decoder.embed_tokens", "model.encoder.embed_tokens"):
        tensors = {key: value for key, value in weights.items() if key != f"{missing}.weight"}
        write(tmp_path, tensors, sharded=False)
        peer = load_peer("marian", tmp_path)
        if peer is None:
            with pytest.raises(bt.BNetError):
                from_pretrained(tmp_path)
        else:
            check_logits(from_pretrained(tmp_path), peer, SENTENCE)

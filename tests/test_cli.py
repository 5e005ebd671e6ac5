"""Command line: draw, explore, heads, models and completion; the files that they write, and their errors."""

import importlib
import inspect
import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from hypothesis import given, strategies as st

import bnet_transformer as bt
from bnet_transformer.cli import main
from bnet_transformer.cli.group import COMMANDS, read_source_signature
from bnet_transformer.cli.io import parse_states


def run(*arguments, **options):
    return CliRunner().invoke(main, list(map(str, arguments)), **options)


def assert_line(result, match, code=2):
    """Assert that a command prints one line on the standard error and nothing else."""
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (code, "", 1), (match, result.output)
    assert result.stderr.startswith("Error: ") and match in result.stderr, (match, result.stderr)


def test_draw_writes_what_the_sentence_writes(tmp_path):
    s = bt.from_pretrained("tiny").sentence("the cat sat")
    suffixes = ["json", "graphml", "gexf", "bif", "svg", "dot", "tex", "png"]
    result = run("draw", "the cat sat", *(part for suffix in suffixes for part in ("-o", tmp_path / f"cat.{suffix}")))
    assert result.exit_code == 0 and "the cat sat" in result.output
    for suffix in suffixes:
        s.draw(tmp_path / f"again.{suffix}")
        assert (tmp_path / f"cat.{suffix}").read_bytes() == (tmp_path / f"again.{suffix}").read_bytes(), suffix


def test_draw_takes_a_part(tmp_path):
    net = bt.bayesuvius(4, slices=2, combine="concat", heads=2, vocabulary=["the", "cat", "sat"])
    net.save(tmp_path / "net.safetensors")
    out = tmp_path / "cat.json"
    options = ["--slices", "1", "--heads", "0", "--words", "cat,2", "--no-weights", "--attention", "--json"]
    result = run("draw", "the cat sat", "-o", out, "-m", tmp_path / "net.safetensors", *options)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)
    assert summary["sentences"][0]["words"] == ["the", "cat", "sat"] and summary["sentences"][0]["files"] == [str(out)]
    names = {node["id"] for node in json.loads(out.read_text())["nodes"]}
    expected = net.sentence("the cat sat").graph(slices=1, heads=0, words=["cat", 2], weights=False)
    assert names == set(expected)


def test_draw_accepts_split_words_and_a_limit(tmp_path):
    words = ["7", "cats", ",", "sat"]
    net = bt.bayesuvius(4, vocabulary=words)
    net.save(tmp_path / "net.safetensors")
    out = tmp_path / "cat.json"

    def draw_names(*options):
        result = run("draw", "cats sat , 7", "-o", out, "-m", tmp_path / "net.safetensors", *options)
        assert result.exit_code == 0, result.output
        return {node["id"] for node in json.loads(out.read_text())["nodes"]}

    s = net.sentence("cats sat , 7")
    assert draw_names("--words", '"7",","') == set(s.graph(words=["7", ","])) == set(s.graph(words=[2, 3]))
    assert draw_names("--words", '"7", 0, sat') == set(s.graph(words=[0, 1, 3]))
    count = s.ground.count_arrows()
    assert draw_names("--limit", count) == set(s.graph())
    refused = run("draw", "cats sat , 7", "-o", out, "-m", tmp_path / "net.safetensors", "--limit", count - 1)
    assert refused.exit_code == 2 and f"limit={count}" in refused.output


def test_draw_passes_its_options_on(tmp_path):
    s, out = bt.from_pretrained("tiny").sentence("the cat sat"), tmp_path / "cat.svg"
    result = run("draw", "the cat sat", "-o", out, "--detail", "words", "--top", 2, "--theme", "dark")
    assert result.exit_code == 0, result.output
    s.draw(tmp_path / "a.svg", detail="words", top=2, theme="dark")
    assert out.read_bytes() == (tmp_path / "a.svg").read_bytes()
    num_edges = s.graph(min_weight=0.2).number_of_edges()
    graph = tmp_path / "cat.json"
    assert run("draw", "the cat sat", "-o", graph, "--min-weight", 0.2, "--limit", num_edges).exit_code == 0
    assert len(json.loads(graph.read_text())["edges"]) == num_edges < s.ground.count_arrows()
    limited = ["-o", tmp_path / "b.svg", "--detail", "nodes", "--limit", 9]
    assert_line(run("draw", "the cat sat", *limited), "at most 9 arrows")
    assert not list(tmp_path.glob("b.*"))


HEADS = ["the cat sat", "sat the", "cat cat the sat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A net that sums heads, one of them dead, in a file; and sentences in another file."""
    folder = tmp_path_factory.mktemp("heads")
    net = bt.encoder(6, slices=2, heads=3, vocabulary=["the", "cat", "sat"], seed=1)
    dead = net.parameters["W_o_1.value"].clone()
    dead[2] = 0
    net.replace({"W_o_1.value": dead}).save(folder / "net.safetensors")
    (folder / "said.txt").write_text("\n".join([HEADS[0], "", f"  {HEADS[1]}  ", HEADS[2], ""]))
    return folder


def run_heads(folder, *arguments, **options):
    command = ["heads", *arguments, "-m", folder / "net.safetensors"]
    result = CliRunner().invoke(main, list(map(str, command)), **options)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "svi"])
def test_heads_prints_the_result_of_inclusion(folder, method):
    net = bt.load(folder / "net.safetensors")
    count = 3 if method == "exact" else 2
    expected = bt.inclusion(net, HEADS[:count], method=method, interval=0.8, sigma=0.7, seed=3, progress=False)
    options = ["--method", method, "--interval", 0.8, "--sigma", 0.7, "--seed", 3, "--limit", count, "--json"]
    by_file = run_heads(folder, "-f", folder / "said.txt", *options)
    if method == "exact":
        by_input = run_heads(folder, "--file", "-", *options, input="\n\n".join(HEADS))
        assert by_file == run_heads(folder, *HEADS, *options) == by_input
    output = json.loads(by_file)
    table = expected.to_dataframe()
    assert [(row["slice"], row["head"]) for row in output["table"]] == list(
        zip(table["slice"], table["head"], strict=True)
    )
    for name in table.columns[2:]:
        values = [math.nan if row[name] is None else row[name] for row in output["table"]]
        assert values == pytest.approx(table[name].tolist(), rel=1e-9, abs=1e-9, nan_ok=True)
    assert (output["sentences"], output["method"], output["sigma"], output["interval"]) == (count, method, 0.7, 0.8)
    assert output["dead"] == [[1, 2]] and (output["duplicates"] is None) == (method == "svi")
    assert output["agreement"]["ablation"]["ablation"] == 1 and output["roles"] is None


@pytest.mark.slow
def test_heads_prints_the_first_heads_or_all(folder):
    top, full = run_heads(folder, *HEADS, "--top", 2), run_heads(folder, *HEADS, "--roles", "--all")
    rows = [line for line in full.splitlines() if line.lstrip().startswith("a_")]
    shown = [line for line in top.splitlines() if line.lstrip().startswith("a_")]
    assert len(rows) == 6 and len(shown) == 2 and rows[0].startswith(shown[0]) and rows[1].startswith(shown[1])
    assert "... and 4 more (--all)" in top and "more (--all)" not in full
    assert "3 sentences" in top and "heads without effect: a_1_2" in top and "rank correlations: log Bayes" in top
    (row, *_) = json.loads(run_heads(folder, *HEADS, "--limit", 1, "--json"))["table"]
    assert row["ablation_error"] is None  # one sentence gives no variance between sentences
    for row in bt.roles(bt.load(folder / "net.safetensors"), HEADS).by_head().itertuples():
        (line,) = [item for item in full.splitlines() if item.split()[:2] == [row.slice, str(row.head)]]
        assert f" {row.role} " in line and line.split()[-2:] == [f"{row.mean:.3f}", f"{row.chance:.3f}"]


@pytest.mark.slow
def test_heads_draws_them(folder, tmp_path):
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "PDF": b"%PDF"}
    outs = [tmp_path / f"map.{suffix}" for suffix in starts]
    arguments = [part for out in outs for part in ("-o", out)]
    result = run_heads(folder, *HEADS[:2], *arguments, "--show", "intervals", "--theme", "dark", "--top", 4)
    for out, start in zip(outs, starts.values(), strict=True):
        assert f"written: {out}" in result and out.read_bytes().startswith(start)
    text = (tmp_path / "map.svg").read_text()
    assert "a_1_2_*" not in text and text.count("_*<") == 4 and "#14171c" in text


BAD_HEADS = [
    ([], "no sentence is given. Give SENTENCES or --file"),
    (["the cat", "-f", "said.txt"], "give SENTENCES or --file, not both"),
    (["said.txt"], "said.txt is a file, not a sentence. Use --file said.txt"),
    (["-f", "none.txt"], "--file none.txt: expected a readable file"),
    (["-f", "."], "expected a readable file"),
    (["-f", "empty.txt"], "--file empty.txt contains no sentences"),
    (["-f", "bytes.txt"], "--file bytes.txt is not valid UTF-8"),
    (["the cat", "-o", "map.docx"], "a supported format; got '.docx'; allowed: .csv, .json, .pdf, .png, .svg"),
    (["the zebra"], "zebra"),
]


def test_heads_refuses_in_one_line(folder, tmp_path, monkeypatch):
    (tmp_path / "said.txt").write_text("the cat")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    for arguments, match in BAD_HEADS:
        assert_line(run("heads", *([] if "-m" in arguments else ["-m", folder / "net.safetensors"]), *arguments), match)
    assert not list(tmp_path.rglob("map*"))


def test_models_lists_what_is_local():
    result = run("models", "--json")
    listing = json.loads(result.output)
    assert listing["models"]["tiny"] == "in the package" and {"bert", "gpt2"} <= set(listing["families"])
    assert "minilm" in run("models").output


BAD = [
    (["draw", "the zebra", "-o", "cat.json"], "word of the sentence: expected a known name; got 'zebra'"),
    (["draw", "the cat", "-o", "cat.json", "--slices", "a"], "--slices: expected integers"),
    (["draw", "the cat"], "the output file is missing. Give it with -o"),
    (
        ["draw", "-f", "two.txt", "-o", "cat.svg"],
        "2 sentences require a name with {} for the number of the sentence. Use -o cat-{}.svg",
    ),
    (["draw", "the cat", "-o", "cat.svg", "--do", "c"], "--do: expected NAME=VALUE; got c"),
    (["draw", "the cat", "-o", "cat.svg", "--do", "c=1", "--do", "c=2"], "--do has two values for c"),
    (["draw", "the cat", "-o", "cat.svg", "-m", "none.safetensors"], "the file none.safetensors does not exist"),
    (["draw", "the \udcff", "-o", "cat.svg"], "text in UTF-8"),
    (
        ["draw", "the cat", "-o", "cat.json", "-o", "cat.bif", "--limit", "99"],
        "a BIF file contains the whole bnet; got limit",
    ),
    (["heads", "the cat", "-o", "cat{}.svg"], "one file contains all sentences, so the name has no {}. Use -o cat.svg"),
    (["explore", "the cat"], "or use --open"),
    (["explore", "the cat", "-o", "cat.svg"], "got '.svg'; allowed: .html"),
    (["fly"], "No such command"),
]


def test_bad_input_is_one_line_and_code_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.txt").write_text("the cat\nthe dog\n")
    for arguments, match in BAD:
        assert_line(run(*arguments), match)
    assert not list(tmp_path.glob("cat*"))


def test_explore_and_draw_take_evidence_do_and_every_source(tmp_path, monkeypatch):
    texts = ["the cat sat", "a dog ran"]
    net = bt.from_pretrained("tiny")
    (tmp_path / "two.txt").write_text("\n".join(texts))
    monkeypatch.chdir(tmp_path)
    options = ["--do", "c=1", "--given", "y_1=cat"]
    for command, suffix in (("explore", "html"), ("draw", "svg")):
        sources = {"f": ["-f", "two.txt"], "s": ["-"], "a": texts}
        for name, source in sources.items():
            result = run(command, *source, "-o", f"{name}{{}}.{suffix}", *options, "--json", input="\n".join(texts))
            assert result.exit_code == 0, result.output
            sentences = json.loads(result.stdout)["sentences"]
            assert [(summary["sentence"], summary["files"]) for summary in sentences] == [
                (text, [f"{name}{k}.{suffix}"]) for k, text in enumerate(texts)
            ]
        for k, text in enumerate(texts):
            expected = tmp_path / f"wanted.{suffix}"
            net.sentence(text).do(c=1).observe(y_1="cat").draw(expected)
            assert all((tmp_path / f"{name}{k}.{suffix}").read_bytes() == expected.read_bytes() for name in sources)


def test_explore_opens_a_browser(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda where: opened.append(where) or len(opened) < 2)
    out = tmp_path / "cat.html"
    assert run("explore", "the cat", "-o", out, "--open").exit_code == 0 and opened == [out.as_uri()]
    result = run("explore", "the cat", "--open")
    assert result.exit_code == 0 and "no browser was found. Open " in result.stderr
    assert opened[1].startswith("file:///") and "<html" in Path(opened[1].removeprefix("file://")).read_text()


def test_serve_reports_a_text_that_names_no_model_before_it_starts(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")

    def start(models, **_):
        raise SystemExit(len(models))

    monkeypatch.setattr("bnet_transformer.serve.server.run_server", start)
    net = bt.bayesuvius(2, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
    net.save(tmp_path / "net")
    bt.fit(net, [("the cat", [0, 1])], method=bt.MAP(steps=1)).save(tmp_path / "fit.safetensors")
    bt.train(net, [("the cat", [0, 1])], steps=1).save(tmp_path / "trained.safetensors")
    net.sentence("the cat").reads().save(tmp_path / "reads.safetensors")
    torch.save({}, tmp_path / "net.pt")
    safetensors.torch.save_file({"W": torch.zeros(1)}, tmp_path / "weights.safetensors")
    (tmp_path / "cut").write_bytes((tmp_path / "net").read_bytes()[:60])
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    saved = [tmp_path / name for name in ("net", "fit.safetensors", "trained.safetensors")]
    assert run("serve", "tiny", *saved, "someone/some-net").exit_code == 5
    assert all(bt.bnet.load_net(path).network for path in saved)
    files = [
        tmp_path / name
        for name in ("net.pt", "reads.safetensors", "weights.safetensors", "cut", "model.gguf", "empty", "none")
    ]
    for model in ["/etc/passwd", "https://huggingface.co/gpt2", "~/net", "", "./none", "none.gguf", *files]:
        assert_line(run("serve", "tiny", model), "expected")


COMPLETED = [
    ("bnet-transformer s", {"serve", "sweep"}),
    ("bnet-transformer draw -m t", {"tiny"}),
    ("bnet-transformer ask se", {"separated"}),
    ("bnet-transformer heads --sh", {"--show"}),
]


def test_shells_complete_commands_options_and_models():
    for words, expected in COMPLETED:
        count = str(len(words.split()) - 1)
        environment = {"_BNET_TRANSFORMER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
        result = CliRunner().invoke(main, [], env=environment, prog_name="bnet-transformer")
        rows = (line.partition(",") for line in result.stdout.splitlines())
        assert {value for kind, _, value in rows if kind == "plain"} == expected, words


def test_options_are_those_of_the_functions_that_they_call():
    forwarded = []
    for name, module in COMMANDS.items():
        command = getattr(importlib.import_module(f"bnet_transformer.cli.{module}"), name)
        commands = command.commands.values() if name == "ask" else [command]
        forwarded += [options for c in commands for group in getattr(c, "forwarded", {}).values() for options in group]
    assert len(forwarded) >= 11
    for options in forwarded:
        path = options.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = importlib.import_module(f"bnet_transformer.{path}")
        classes = [
            kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__
        ]
        for name in options.names:
            function = next(getattr(owner, name) for owner in (module, *classes) if hasattr(owner, name))
            expected = inspect.signature(function).parameters
            given = read_source_signature(options.file, name)
            assert given.keys() <= expected.keys() and set(options.only) <= given.keys(), (options.file, name)
            for option in options.only or given:
                assert given[option].help, f"no help: {name} {option} in {options.file}"
                if isinstance(expected[option].default, bool | int | float | str) and given[option].default is not None:
                    assert given[option].default == expected[option].default, (name, option)


@given(st.lists(st.text('a7", ', max_size=4), min_size=1, max_size=4))
def test_states_of_the_command_line_are_separated_by_commas_outside_of_quotes(parts):
    """The oracle is a reader of one character at a time, for states in which quotes are at both ends or nowhere."""
    names = [part.replace('"', "").strip() or "a" for part in parts]
    quoted = [f'"{name}"' if "," in name or "7" in name else name for name in names]
    assert parse_states("--evidence", " , ".join(quoted)) == names

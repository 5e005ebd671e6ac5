"""The command line: what it writes, what it lists, how it refuses, how fast it starts."""

import json
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

import bnet_transformer as bt
from bnet_transformer.cli import main


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.parametrize("suffix", ["json", "graphml", "bif", "svg", "dot", "tex", "png"])
def test_draw_writes_what_the_sentence_writes(tmp_path, suffix):
    found = run("draw", "the cat sat", "-o", tmp_path / f"cat.{suffix}")
    assert found.exit_code == 0 and "the cat sat" in found.output
    bt.from_pretrained("tiny").sentence("the cat sat").draw(tmp_path / f"again.{suffix}")
    assert (tmp_path / f"cat.{suffix}").read_bytes() == (tmp_path / f"again.{suffix}").read_bytes()


def test_draw_takes_a_part(tmp_path):
    net = bt.bayesuvius(4, slices=2, combine="concat", heads=2, vocabulary=["the", "cat", "sat"])
    net.save(tmp_path / "net.safetensors")
    out = tmp_path / "cat.json"
    options = ["--slices", "1", "--heads", "0", "--words", "cat,2", "--no-weights", "--attention", "--json"]
    found = run("draw", "the cat sat", "-o", out, "-m", tmp_path / "net.safetensors", *options)
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["words"] == ["the", "cat", "sat"]
    drawn = {node["id"] for node in json.loads(out.read_text())["nodes"]}
    wanted = net.sentence("the cat sat").graph(slices=1, heads=0, words=["cat", 2], weights=False)
    assert drawn == set(wanted)


def test_draw_takes_words_as_they_stand_and_a_limit(tmp_path):
    words = ["7", "cats", ",", "sat"]
    net = bt.bayesuvius(4, vocabulary=words)
    net.save(tmp_path / "net.safetensors")
    out = tmp_path / "cat.json"

    def drawn(*options):
        found = run("draw", "cats sat , 7", "-o", out, "-m", tmp_path / "net.safetensors", *options)
        assert found.exit_code == 0, found.output
        return {node["id"] for node in json.loads(out.read_text())["nodes"]}

    s = net.sentence("cats sat , 7")
    assert drawn("--word", "7", "--word", ",") == set(s.graph(words=["7", ","])) == set(s.graph(words=[2, 3]))
    assert drawn("--word", "7", "--words", "0,sat") == set(s.graph(words=[0, 1, 3]))
    count = s.ground.count_arrows()
    assert drawn("--limit", count) == set(s.graph())
    refused = run("draw", "cats sat , 7", "-o", out, "-m", tmp_path / "net.safetensors", "--limit", count - 1)
    assert refused.exit_code == 2 and f"limit={count}" in refused.output


def test_draw_leaves_out_weak_arrows_before_it_counts_them(tmp_path):
    s = bt.from_pretrained("tiny").sentence("the cat sat on a dog ran by the")
    kept = s.graph(min_weight=0.2).number_of_edges()
    assert kept < s.ground.count_arrows()
    options = ["--min-weight", 0.2, "--limit", kept]
    found = run("draw", "the cat sat on a dog ran by the", "-o", tmp_path / "cat.json", *options)
    assert found.exit_code == 0, found.output
    assert len(json.loads((tmp_path / "cat.json").read_text())["edges"]) == kept


def test_draw_takes_the_options_of_figures(tmp_path):
    out = tmp_path / "cat.svg"
    found = run("draw", "the cat sat", "-o", out, "--detail", "words", "--top", 2, "--theme", "dark")
    assert found.exit_code == 0, found.output
    bt.from_pretrained("tiny").sentence("the cat sat").draw(tmp_path / "a.svg", detail="words", top=2, theme="dark")
    assert out.read_bytes() == (tmp_path / "a.svg").read_bytes()


def test_models_lists_what_is_local():
    found = run("models", "--json")
    told = json.loads(found.output)
    assert told["models"]["tiny"] == "in the package" and {"bert", "gpt2"} <= set(told["families"])
    assert "minilm" in run("models").output


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["draw", "the cat", "-o", "cat.docx"], "one that says how; got '.docx'; allowed: .bif"),
        (["draw", "the zebra", "-o", "cat.json"], "word of the sentence: expected a known name; got 'zebra'"),
        (["draw", "the cat", "-o", "cat.json", "--slices", "a"], "--slices: expected whole numbers"),
        (["draw", "the cat", "-o", "cat.json", "--slices", "7"], "slices: expected numbers from 0 to 0"),
        (["draw", "the cat", "-o", "cat.json", "-m", "./none"], "the folder of a model; got nothing there"),
        (["draw", "the cat", "-o", "none/cat.json"], "none"),
        (["draw", "the cat"], "Missing option"),
        (["fly"], "No such command"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, monkeypatch, arguments, match):
    monkeypatch.chdir(tmp_path)
    found = run(*arguments)
    told = [line for line in found.output.splitlines() if line.startswith("Error:")]
    assert found.exit_code == 2 and len(told) == 1 and match in told[0]
    assert "Traceback" not in found.output and not list(tmp_path.glob("cat*"))


def test_help_is_quick_and_imports_no_torch():
    code = "import sys; from bnet_transformer.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    spent = []
    for _ in range(3):
        start = time.perf_counter()
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        spent.append(time.perf_counter() - start)
    assert "draw" in found.stdout and "models" in found.stdout
    assert min(spent) < 1.0  # 0.15 s on a quiet machine

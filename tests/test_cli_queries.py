"""Command line: ask, sweep, fit, train and cost print the numbers of Python, for any source of the text."""

import json
import math

import pandas as pd
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.cli.io import format_json
from bnet_transformer.cli.questions import _format_state
from bnet_transformer.interventions import Zero
from tests.test_cli import assert_line, run

TEXTS = ["the cat sat", "a dog ran by the tree"]


@pytest.fixture(scope="module")
def tiny():
    return bt.from_pretrained("tiny")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with text files, as the working directory."""
    (tmp_path / "said.txt").write_text("\ufeff" + TEXTS[0] + "\n\n  " + TEXTS[1] + "\n", encoding="utf-8")
    (tmp_path / "pairs.txt").write_text("the cat sat\tthe dog sat\nthe dog ran\tthe cat ran\n")
    (tmp_path / "labelled.txt").write_text("the cat sat\tyes\na dog\tno\nthe mat\t_\n")
    (tmp_path / "tagged.txt").write_text("the cat\tD 7\na dog\t_ N\n")
    (tmp_path / "empty.txt").write_text(" \n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def query(*arguments, **options):
    result = run(*arguments, "--json", **options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def close(result, expected):
    torch.testing.assert_close(torch.tensor(result, dtype=torch.float64), torch.as_tensor(expected).double())


# ask


def test_posterior_is_that_of_the_sentence(tiny, folder):
    options = ["--given", "y_1=sat", "--do", "x_1_0=zero"]
    result = query("ask", "posterior", "y_2,c", "-f", "said.txt", *options)
    by_input = query("ask", "posterior", "y_2,c", "-", *options, input="\n".join(TEXTS))
    assert result == by_input == query("ask", "posterior", "y_2,c", *TEXTS, *options)
    for summary, text in zip(result["sentences"], TEXTS, strict=True):
        s = tiny.sentence(text).do(x_1_0=Zero()).observe(y_1="sat")
        close(summary["probabilities"], s.posterior(["y_2", "c"]))
        assert summary["labels"][0][8] == "sat" and summary["labels"][1] == ["0", "1", "2"]


def test_posterior_prints_and_writes_its_rows(tiny, folder):
    result = run(
        "ask", "posterior", "y_2", TEXTS[0], "--do", "c=1", "--top", 1, "-o", "p.csv", "-o", "p.svg", "-o", "p.json"
    )
    best = tiny.sentence(TEXTS[0]).do(c=1).posterior("y_2")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["y_2", "probability"] and lines[2] == "... and 15 more (--all)"
    assert lines[1].split()[1] == f"{float(best.max()):.3f}"
    close(pd.read_csv("p.csv").probability.tolist(), best)
    assert (folder / "p.svg").read_text().startswith("<?xml")
    assert json.loads((folder / "p.json").read_text())["sentences"][0]["nodes"] == ["y_2"]
    run("ask", "posterior", "c", *TEXTS, "-o", "a.csv", "-o", "b.csv", "-o", "c{}.csv")
    assert pd.read_csv("a.csv").sentence.tolist() == [text for text in TEXTS for _ in range(3)]
    assert (folder / "a.csv").read_text() == (folder / "b.csv").read_text() and len(pd.read_csv("c1.csv")) == 3


@pytest.mark.parametrize("state", ["١", "²", "+1", "1_0"])
def test_a_state_or_the_index_of_a_word_is_ascii_digits(folder, state):
    assert_line(run("ask", "posterior", "c", TEXTS[0], "--given", f"c={state}"), "c: expected")
    assert_line(run("ask", "reads", TEXTS[0], "--word", state), "expected a word")


def test_words_that_are_numbers_and_vectors_can_be_observed(folder):
    net = bt.bayesuvius(2, vocabulary=["zero", "7", "cat"], observe=bt.tpm.Categorical(3), seed=3)
    net.save("net.safetensors")
    s = net.sentence("cat 7")
    for written, expected in (('y_1="7"', {"y_1": "7"}), ("y_1=2", {"y_1": 2}), ("y_1=zero", {"y_1": "zero"})):
        close(query("ask", "posterior", "c", "cat 7", "-m", "net.safetensors", "--given", written)["sentences"][0][
            "probabilities"], s.posterior("c", expected))  # fmt: skip
    result = query("ask", "posterior", "y_1", "cat 7", "-m", "net.safetensors", "--do", "x_1_1=0.5,-2")
    close(result["sentences"][0]["probabilities"], s.do(x_1_1=[0.5, -2.0]).posterior("y_1"))


def test_structure_is_that_of_the_sentence(tiny, folder):
    s = tiny.sentence(TEXTS[0])
    for name in ("blanket", "parents", "children", "ancestors", "descendants"):
        expected = getattr(s, name)("k_0_1")
        assert query("ask", name, "k_0_1", TEXTS[0])["sentences"][0]["nodes"] == expected
        assert run("ask", name, "k_0_1", TEXTS[0]).stdout.split() == expected
    assert run("ask", "parents", "c", TEXTS[0]).stdout == "none\n"
    assert query("ask", "parents", "x_1_1", TEXTS[0], "--do", "x_1_1=zero")["sentences"][0]["nodes"] == []
    arguments = ["x_0_0", "q_0_2", TEXTS[0], "--given", "x_0_2,W_q_0", "--verify"]
    (result,) = query("ask", "separated", *arguments)["sentences"]
    expected = s.separated("x_0_0", "q_0_2", ["x_0_2", "W_q_0"], verify=True)
    assert result["separated"] is bool(expected) is True and result["dependence"] == expected.dependence
    assert result["trail"] is None and "separated\n" in run("ask", "separated", *arguments).stdout
    connected = ["q_0_0", "q_0_1", TEXTS[0], "--given", "c", "--given", "x_0_0"]
    assert query("ask", "separated", *connected)["sentences"][0]["trail"] == "q_0_0 <- W_q_0 -> q_0_1"
    assert query("ask", "separated", *connected, "--deterministic")["sentences"][0]["separated"]


def test_reads_are_those_of_the_sentence(tiny, folder):
    options = ["--residual", 0.25, "--given", "y_1=sat", "--word", "sat", "--paths", 2]
    (result,) = query("ask", "reads", TEXTS[0], *options, "-o", "r.svg", "-o", "r.csv")["sentences"]
    expected = tiny.sentence(TEXTS[0]).observe(y_1="sat").reads(residual=0.25)
    close(result["matrix"], expected.matrix)
    assert [path["words"] for path in result["paths"]] == [[*path.words] for path in expected.paths(2, count=2)]
    close(pd.read_csv("r.csv").share.tolist(), expected.matrix.flatten())
    assert run("ask", "reads", TEXTS[0], *options).stdout.splitlines()[2:] == [*map(str, expected.paths(2, count=2))]


# sweep


def test_sweep_is_that_of_python(tiny, folder):
    pairs = [("the cat sat", "the dog sat"), ("the dog ran", "the cat ran")]
    clean, corrupt = ([tiny.sentence(pair[k]) for pair in pairs] for k in (0, 1))
    expected = bt.sweep(clean, corrupt, at="x", metric={"y_2": ("cat", "dog")})
    by_file = query("sweep", "-f", "pairs.txt", "--answer", "cat,dog", "-o", "s.csv", "-o", "s.svg")
    close(by_file["values"], expected.values)
    close(pd.read_csv("s.csv").effect.tolist(), expected.values.flatten())
    by_arguments = query("sweep", *pairs[0], *pairs[1], "--metric", "y_2=cat,dog")
    assert by_arguments["table"] == by_file["table"] and by_file["axes"] == ["slice", "word"]
    by_input = query("sweep", "-", "--metric", "y_2=2,3", input=(folder / "pairs.txt").read_text())
    assert by_input["values"] == by_file["values"]
    zero = bt.sweep(Zero(), [s.do(c=0) for s in clean], at=["v_0_1"], metric={"y_2": "cat"})
    result = query(
        "sweep", *(pair[0] for pair in pairs), "--ablate", "zero", "--do", "c=0", "--at", "v_0_1", "--answer", "cat"
    )
    close(result["values"], zero.values)
    assert result["clean"] is None and result["table"][0]["name"] == "v_0_1"
    noise = query("sweep", *pairs[0], "--answer", "cat", "--direction", "noise", "--first-order", "--steps", "3")
    options = {"direction": "noise", "method": bt.Gradient(steps=3), "metric": {"y_2": "cat"}}
    close(noise["values"], bt.sweep(clean[0], corrupt[0], **options).values)
    one = query("sweep", *pairs[0], "--answer", "cat")["table"][0]
    assert one["error"] is None and one["name"] == "x_0_0"  # one example gives no variance between examples


@pytest.mark.parametrize("name", ["add_-1", "x_1_-1", "v_0_0_* -> a_0_0_*", "a_0_0 -> y"])
def test_the_cells_of_a_sweep_are_names_with_any_index(folder, name):
    net = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat", "dog"])
    net.save("net.safetensors")
    pair, metric = ["the cat the", "the dog the"], {"y_2": "cat"}
    expected = bt.sweep(*map(net.sentence, pair), at=[name], metric=metric).values
    close(query("sweep", *pair, "--answer", "cat", "--at", name, "-m", "net.safetensors")["values"], expected)


def test_numerals_are_states_and_in_quotes_words(folder):
    words = ["2", "1", "cat", "the", ",", '"']
    net = bt.bayesuvius(4, vocabulary=words, observe=bt.tpm.Categorical(6, labels=tuple(words)))
    net.save("net.safetensors")
    pair = ["the cat", "the 1"]
    clean, corrupt = map(net.sentence, pair)
    for text, expected, head in [
        ("1,2", (1, 2), "log P(y_1 = state 1 '1') - log P(y_1 = state 2 'cat'):"),
        ('"1", "2"', ("1", "2"), "log P(y_1 = state 1 '1') - log P(y_1 = state 0 '2'):"),
        ('"cat",0', ("cat", 0), "log P(y_1 = state 2 'cat') - log P(y_1 = state 0 '2'):"),
        ('",","""', (",", '"'), "log P(y_1 = state 4 ',') - log P(y_1 = state 5 '\"'):"),
        ('"2"', "2", "log P(y_1 = state 0 '2'):"),
    ]:
        values = bt.sweep(clean, corrupt, metric={"y_1": expected}).values
        for options in (["--answer", text], ["--metric", f"y_1={text}"]):
            close(query("sweep", *pair, *options, "-m", "net.safetensors")["values"], values)
        assert run("sweep", *pair, *options, "-m", "net.safetensors").stdout.splitlines()[1].startswith(head)


def test_the_states_of_a_metric_are_shown_or_an_error(tiny, folder):
    pair = ("the cat sat", "the dog sat")
    for name in ("y", "y_*", "y_-1"):
        values = bt.sweep(*map(tiny.sentence, pair), metric={name: "cat"}).values
        close(query("sweep", *pair, "--metric", f"{name}=cat")["values"], values)
        assert f"log P({name} = state 2 'cat'):" in run("sweep", *pair, "--metric", f"{name}=cat").stdout
    for unknown in ("elephant", 99, -1):
        with pytest.raises(bt.EvidenceError):
            _format_state(tiny.sentence(pair[0]), "y_2", unknown)


# fit and train


@pytest.mark.slow
def test_fit_is_that_of_python_and_can_be_queried(folder):
    words = [text.split() for text in TEXTS]
    vocabulary = list(dict.fromkeys(word for text in words for word in text))
    net = bt.bayesuvius(
        4, heads=2, mask="causal", vocabulary=vocabulary, observe=bt.tpm.Categorical(len(vocabulary)), seed=2
    )
    expected = bt.fit(
        net, [(ws[:-1], ws[1:]) for ws in words], method=bt.MAP(restarts=1, steps=3), seed=2, progress=False
    )
    options = ["--dim", 4, "--restarts", 1, "--steps", 3, "--seed", 2]
    result = query(
        "fit", "-f", "said.txt", *options, "-o", "n.safetensors", "-o", "n.fit", "-o", "n.svg", "-o", "n.json"
    )
    assert result["bounds"] == pytest.approx(expected.bounds) and result["observed"] == "next"
    assert result == query("fit", *TEXTS, *options) | {"files": result["files"]}
    assert json.loads((folder / "n.json").read_text()) == result
    for name, value in bt.load("n.safetensors").parameters.items():
        torch.testing.assert_close(value, expected.net.parameters[name])
    assert bt.load("n.fit").bounds == pytest.approx(expected.bounds)
    assert " of 2 heads live" in run("fit", "-", *options, input="\n".join(TEXTS)).stdout
    again = query("fit", "-f", "said.txt", "-m", "n.safetensors", "--learn", "c.logits", "--method", "em", "--steps", 2)
    assert again["learned"] == ["c.logits"] and again["bounds"][0] == pytest.approx(expected.bounds[-1], abs=0.5)
    out = query("ask", "posterior", "c", TEXTS[0], "-m", "n.fit", "--given", "y_1=sat")
    close(out["sentences"][0]["probabilities"], expected.net.sentence(TEXTS[0]).posterior("c", {"y_1": "sat"}).float())


@pytest.mark.slow
def test_fit_reads_labels_and_words_behind_a_tab(folder):
    result = query("fit", "-f", "labelled.txt", "--dim", 2, "--steps", 2, "-o", "l.safetensors")
    net = bt.load("l.safetensors")
    assert result["observed"] == "label" and net.network.get_spec("y").tpm.labels == ("no", "yes")
    assert query("ask", "posterior", "y", "a cat", "-m", "l.safetensors")["sentences"][0]["labels"] == [["no", "yes"]]
    result = query("fit", "-f", "tagged.txt", "--dim", 2, "--steps", 2, "-o", "t.safetensors", "--checkpoint", "kept")
    assert result["observed"] == "words"
    assert bt.load("t.safetensors").network.get_spec("y").tpm.labels == ("7", "D", "N")
    more = query("fit", "-f", "tagged.txt", "--dim", 2, "--steps", 4, "--checkpoint", "kept", "--changed")
    assert len(more["bounds"]) > 2 and more["bounds"][:2] == result["bounds"][:2]


def test_train_is_that_of_python_and_resumes(folder):
    vocabulary = [*dict.fromkeys(" ".join(TEXTS).split()), "end"]
    net = bt.decoder(4, heads=2, slices=1, dropout=0.0, vocabulary=vocabulary, seed=1)
    expected = bt.train(
        net, TEXTS, steps=3, optimizer=bt.AdamW(rate=0.01), stop="end", seed=1, held_out=TEXTS, progress=False
    )
    options = ["--rate", 0.01, "--stop", "end", "--seed", 1, "--held-out", "said.txt"]
    new = ["--dim", 4, "--slices", 1]
    result = query(
        "train", "-f", "said.txt", *new, *options, "--steps", 3, "-o", "n.safetensors", "-o", "n.csv", "-o", "n.svg"
    )
    assert result["losses"] == pytest.approx(expected.losses) and len(result["held_out"]) == len(expected.held_out)
    assert pd.read_csv("n.csv").loss.tolist() == pytest.approx(expected.losses)
    for name, value in bt.load("n.safetensors").parameters.items():
        torch.testing.assert_close(value, expected.net.parameters[name])
    first = query("train", *TEXTS, *new, *options, "--steps", 2, "--checkpoint", "kept")
    more = query("train", *TEXTS, *new, *options, "--steps", 3, "--checkpoint", "kept", "--resume")
    assert more["losses"] == result["losses"] and first["losses"] == result["losses"][:2]
    printed = run("train", "-", "-m", "n.safetensors", "--epochs", 2, input=TEXTS[0]).stdout
    assert printed.startswith("2 steps on 1 sentences: loss ")


# cost


def test_cost_is_that_of_the_net(tiny, folder):
    result = query("cost", "-f", "said.txt", "--batch", 2, "-o", "c{}.csv")["costs"]
    assert result == query("cost", "-", "--batch", 2, input="\n".join(TEXTS))["costs"]
    for k, cost in enumerate(result):
        expected = tiny.cost(len(TEXTS[k].split()), batch=2)
        assert (cost["flops"], cost["parameters"], cost["of"]) == (expected.flops, expected.parameters, TEXTS[k])
        assert pd.read_csv(f"c{k}.csv").flops.sum() == expected.flops == sum(row["flops"] for row in cost["rows"])
    by_number = query("cost", "--words", 3, "--batch", 2, "-o", "c.svg")["costs"][0]
    assert {**by_number, "of": TEXTS[0]} == result[0] and (folder / "c.svg").stat().st_size > 1000
    assert run("cost", "--words", 3).stdout.startswith(str(tiny.cost(3)).splitlines()[0])
    two = run("cost", "--words", 3, "--words", 4, "-o", "k{}.csv").stdout
    assert two.endswith("\nwritten: k0.csv\nwritten: k1.csv\n") and (folder / "k1.csv").exists()
    stacks = bt.encoder_decoder(8, heads=2, slices=1, hidden=8, vocabulary=["a", "b"])
    stacks.save("two.safetensors")
    expected = stacks.cost({"enc": 3, "dec": 2}).flops
    for source in (["a b a | b a"], ["--words", "enc=3,dec=2"]):
        assert query("cost", *source, "-m", "two.safetensors")["costs"][0]["flops"] == expected


BAD = [
    (["ask", "posterior", "c"], "no sentence is given"),
    (["ask", "posterior", "c,", "the cat"], "NODES: expected names separated by commas"),
    (["ask", "posterior", "c,y_0,y_1", "the cat", "-o", "p.svg"], "allowed: .csv, .json"),
    (["ask", "reads", "the cat the", "--word", "the"], "Use the index of one of them: 0, 2"),
    (["ask", "reads", "the cat", "--word", "2"], "or an index up to 1; got 2"),
    (["sweep", "the cat sat", "--answer", "cat"], "pairs of sentences"),
    (["sweep", "the cat", "the dog"], "the metric is missing. Use --metric"),
    (["sweep", "the cat", "the dog", "--answer", "cat,dog,mat"], "one or two states"),
    (["sweep", "the cat", "the dog", "--answer", "cat,"], "states separated by commas; got cat,"),
    (["sweep", "the cat", "the dog", "--answer", "cat", "--top", "1", "--all"], "give --top or --all, not both"),
    (["sweep", "the cat", "the dog", "--answer", "cat", "-o", "{}.csv"], "-o {}.csv: one file contains all sentences"),
    (["ask", "posterior", "c", "the cat", "--top", "1", "--all"], "give --top or --all, not both"),
    (["ask", "reads", "the cat", "--paths", "2"], "--paths requires --word"),
    (["fit", "the cat", "-o", "{}.json"], "-o {}.json: one file contains all sentences"),
    (["fit", "the cat", "-m", "tiny", "--dim", "3"], "--dim cannot be combined with --model"),
    (["fit", "the"], "at least 2 words"),
    (
        ["fit", "the cat", "--method", "nuts", "--restarts", "2"],
        "--restarts is not an option of --method nuts. Use --method map",
    ),
    (["fit", "the cat", "--observe", "label"], "--observe label requires observations"),
    (["fit", "the cat\tb", "the dog"], "one tab in each sentence, or no tabs"),
    (["fit", "-f", "labelled.txt", "--observe", "words"], "as many words after the tab"),
    (["fit", "the cat", "--resume"], "--checkpoint"),
    (["fit", "the cat", "--held-out", "none.txt"], "--file none.txt"),
    (["train", "-f", "labelled.txt"], "lines without tabs"),
    (["cost", "the cat", "--words", "3"], "give sentences or --words, not both"),
    (["cost", "--words", "many"], "an integer, or one for each stack"),
]


def test_bad_questions_are_one_line_and_code_2(folder):
    before = set(folder.iterdir())
    for arguments, match in BAD:
        assert_line(run(*arguments), match)
    assert set(folder.iterdir()) == before


def test_json_has_null_for_what_is_no_number():
    table = pd.DataFrame({"a": [1.5, math.nan]})
    values = {"a": torch.tensor([1.0, math.inf]), "b": table, "c": (None, True, 2), "d": math.nan}
    assert format_json(values) == '{"a": [1.0, null], "b": [{"a": 1.5}, {"a": null}], "c": [null, true, 2], "d": null}'

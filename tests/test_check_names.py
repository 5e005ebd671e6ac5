"""The checks of names and of prose: the text that they report, and the text that they allow."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / ".ci" / "check_names.py"


@pytest.fixture(scope="module")
def guard():
    spec = importlib.util.spec_from_file_location("check_names", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name, code, names",
    [
        (
            "a.py",
            "def f(told, *, own=1):\n    for each in told: self.kept = lambda found: 0",
            "each found kept own told",
        ),
        (
            "a.py",
            "import numpy as there\nclass WhatIsSaid: got: int\nwith a as (late, b): pass",
            "WhatIsSaid got late there",
        ),
        ("a.py", "def test_each_of_its_own(): held_out, outlook, posted = 1, 2, 3", ""),
        ("told.py", "x = 1", "told"),
        (
            "a.js",
            "// let told\nconst { own, ok } = f('each');\nfunction find(wanted) { this.kept = 1; }",
            "kept own wanted",
        ),
        ("a.js", "f(`don't ${a ? `each ${own}` : 'met'} {kept`, { found: k }); class Told {}", "Told found own"),
    ],
)
def test_everyday_words_are_refused_where_names_are_defined(guard, tmp_path, name, code, names):
    (tmp_path / name).write_text(code)
    assert sorted({fault.split()[-1].strip("'") for fault in guard.check_file(tmp_path / name)}) == names.split()


def test_a_class_name_is_that_of_one_class(guard, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(f"class Run: pass\nclass Run{name}: pass")
    (fault,) = guard.find_repeated_classes(tmp_path)
    assert fault.startswith("class Run ")


@pytest.mark.parametrize(
    ("name", "text", "phrases"),
    [
        ("docs/a.md", 'It hangs\non x. `is told`, "is told".\n```\nis told\n```\nThat stands for x.', "hangs on"),
        ("bnet_transformer/a.py", '"""Is told."""\nx = "got none"  # depends, hangs on\n', "got none,hangs on,is told"),
        ("tests/test_a.py", 'x = "got none"', ""),
    ],
)
def test_phrases_of_the_word_list_are_found(monkeypatch, tmp_path, name, text, phrases):
    monkeypatch.syspath_prepend(PATH.parent)
    check_prose = importlib.import_module("check_prose")
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(text)
    pattern = check_prose.compile_phrases(["is told", "hangs on", "got none"])
    matches = {phrase.lower() for *_, phrase in check_prose.iter_phrases(tmp_path, pattern)}
    assert matches == set(filter(None, phrases.split(",")))

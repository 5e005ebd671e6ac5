"""Any word survives every export: a parser of another library returns it, and no part of it is executed.

Pages in a browser are in `test_page_browser.py`, plots in `test_plots.py`, error messages in `test_compiled_inputs.py`.
"""

from __future__ import annotations

import csv
import io
import json
import re
import string
import tempfile
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer.bridges.networkx import to_json
from bnet_transformer.bridges.pgmpy import parse_state_name, to_bif
from bnet_transformer.cli import main
from bnet_transformer.cli.io import Answer
from bnet_transformer.figures.fonts import escape_invisible, format_token
from bnet_transformer.figures.graph_files import to_graphml
from bnet_transformer.figures.graphviz import to_dot
from bnet_transformer.figures.svg import to_svg
from bnet_transformer.figures.tikz import LATEX_ACCENTS, LATEX_ESCAPES, escape_tex, to_tikz

MARKUP = [
    "</script>",
    "<img src=x onerror=alert(1)>",
    "]]>",
    "<!--",
    "&amp;",
    "&lt;b>",
    "&#65;",
    "&",
    '"',
    "'",
    "<",
    ">",
]
TEX = ["\\input{/etc/passwd}", "\\write18{id}", "^^5c", "%", "#", "{", "}", "_", "~", "$x$", "\\\\", "``", "--", "!`"]
DOT = ["\\N", "\\G", "\\l", "\\", "-> [label=x];", "<B>b</B>", "|", "\\n"]
SHELL = [
    "$(id)",
    "`id`",
    "=cmd()",
    "@",
    ",",
    ";",
    "{{about}}",
    "{0}",
    "%s",
    "_27_",
    '"\\u0000"',
    "\x1b]0;x\x07",
    "\x1b[2J",
]
INVISIBLE = ["\n", "\r", "\t", "\0", "\u2028", "\u202e", "\ufeff", "\ufffe", "\x85", " ", "\u00a0"]
PIECES = st.sampled_from([*MARKUP, *TEX, *DOT, *SHELL, *INVISIBLE, "é", "ï", "中", "😀", "a"])
WORD = st.lists(PIECES | st.characters(codec="utf-8"), min_size=1, max_size=3).map("".join)
WORDS = st.lists(WORD, min_size=4, max_size=4, unique=True)
SURROGATE_WORDS = st.lists(WORD | st.sampled_from(["\ud800", "a\udfff"]), min_size=4, max_size=4, unique=True)


def make_settings(examples: int) -> settings:
    """Settings for a fixed number of examples, the same in every run."""
    kwargs = {"suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}
    return settings(max_examples=examples, derandomize=True, database=None, deadline=None, **kwargs)


def make_sentence(words: list[str]) -> bt.Sentence:
    """A sentence of these words, which are also the vocabulary and the labels of the readout."""
    observe = bt.tpm.Categorical(len(words), labels=tuple(words))
    return bt.bayesuvius(2, heads=2, vocabulary=words, observe=observe).sentence(words)


# data


@given(SURROGATE_WORDS)
@make_settings(6)
def test_json_and_graphml(words: list[str]) -> None:
    sentence = make_sentence(words)
    graph = sentence.graph()
    expected = {name: token for name, token in graph.nodes(data="token") if token is not None}
    result = {node["id"]: node["token"] for node in json.loads(to_json(graph))["nodes"] if node["token"] is not None}
    assert result == expected
    back = nx.read_graphml(io.BytesIO(to_graphml(sentence.net.network, graph)))
    assert set(back) == set(graph)
    for name, token in expected.items():
        read = back.nodes[name]["token"]
        quoted = len(read) > 1 and read[0] == read[-1] == '"'
        assert (json.loads(read) if quoted else read) == token


@pytest.mark.slow
@given(SURROGATE_WORDS)
@make_settings(1)
def test_bif(words: list[str]) -> None:
    from pgmpy.readwrite import BIFReader

    text = to_bif(make_sentence(words).net.sentence(words[:1]).state.model)  # pgmpy takes seconds for a few tables
    assert text.isascii()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = BIFReader(string=text).get_model()
    assert [parse_state_name(state) for state in result.get_cpds("y_0").state_names["y_0"]] == words
    assert set(result.nodes) == {"c", "y_0"}


@given(WORDS)
@make_settings(30)
def test_tables_as_csv(words: list[str]) -> None:
    import pandas as pd

    table = pd.DataFrame({"word": words, "share": range(len(words))})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        Answer(table=table).write(str(path), {})
        rows = list(csv.reader(io.StringIO(path.read_bytes().decode(), newline="")))
    assert rows == [["word", "share"], *([word, str(k)] for k, word in enumerate(words))]


# pictures

SVG = "{http://www.w3.org/2000/svg}"
SVG_TAGS = {"svg", "title", "desc", "style", "rect", "g", "path", "circle", "text", "tspan"}
VIEWS: list[dict[str, Any]] = [{"detail": "words"}, {"detail": "nodes", "weights": False}]


@given(SURROGATE_WORDS)
@make_settings(4)
def test_svg(words: list[str]) -> None:
    s = make_sentence(words).do(c=0)
    for view in VIEWS:
        root = ElementTree.fromstring(to_svg(s.picture(**view)))
        assert {item.tag.removeprefix(SVG) for item in root.iter()} <= SVG_TAGS
        assert not [name for item in root.iter() for name in item.attrib if name.startswith("on") or "href" in name]
        texts = "\n".join("".join(item.itertext()) for item in root.iter(f"{SVG}text"))
        assert all(format_token(word) in texts for word in words)
        titles = "\n".join(str(item.text) for item in root.iter(f"{SVG}title"))
        assert all(f"\nx_0_{k} “{format_token(word, None)}”" in titles for k, word in enumerate(words))


@pytest.mark.slow
@given(SURROGATE_WORDS)
@make_settings(2)
def test_dot(words: list[str]) -> None:
    """Graphviz reads backslashes in labels, and in tooltips twice; `pydot` returns both unchanged."""
    import pydot

    def unescape(text: str) -> str:
        return re.sub(r"\\(.)", r"\1", text)

    def iter_nodes(part: Any) -> Iterator[Any]:
        yield from part.get_nodes()
        for inner in part.get_subgraphs():
            yield from iter_nodes(inner)

    s = make_sentence(words).do(c=0)
    for view in VIEWS:
        (graph,) = pydot.graph_from_dot_data(to_dot(s.picture(**view)))
        nodes = {unescape(node.get_name()[1:-1]): node for node in iter_nodes(graph) if node.get("label")}
        for k, word in enumerate(words):
            node = nodes[f"x_0_{k}"]
            label = "".join(ElementTree.fromstring(f"<p>{node.get('label')[1:-1]}</p>").itertext())
            assert f"“{format_token(word, None if view['detail'] == 'words' else 16)}”" in unescape(label)
            tooltip = unescape(unescape(node.get("tooltip")[1:-1])).replace("&amp;", "&")
            assert tooltip.startswith(f"x_0_{k} “{format_token(word, None)}”")


PLAIN = set(string.printable) - set(LATEX_ESCAPES) - set("\t\n\r\x0b\x0c")
BACK = {text: letter for letter, text in LATEX_ESCAPES.items() if letter != "’"}
SPELLED = "|".join(map(re.escape, sorted(BACK, key=len, reverse=True)))
ONE = re.compile(
    rf"(?P<special>{SPELLED})|\\bnetletter\{{(?P<code>[0-9A-F]+)\}}|\\(?P<mark>.)\{{\\?(?P<base>[A-Za-z])\}}"
)


def read_tex(text: str) -> str:
    """Return the text that TeX typesets; the text contains only letters and commands for letters."""
    result, index = "", 0
    while index < len(text):
        match = ONE.match(text, index)
        if match is None:
            assert text[index] in PLAIN, text[index:]
            result, index = result + text[index], index + 1
            continue
        marks = {mark: accent for accent, mark in LATEX_ACCENTS.items()}
        if match["special"]:
            result += BACK[match["special"]]
        elif match["code"]:
            result += chr(int(match["code"], 16))
        else:
            result += unicodedata.normalize("NFC", match["base"] + marks[match["mark"]])
        index = match.end()
    return result


@given(SURROGATE_WORDS)
@make_settings(200)
def test_letters_of_tex(words: list[str]) -> None:
    for word in words:
        assert read_tex(escape_tex(word)) == word.replace("’", "'")


def commands(tex: str) -> set[str]:
    """The control sequences of a text."""
    return set(re.findall(r"\\(?:[A-Za-z]+|.)", tex))


@given(SURROGATE_WORDS)
@make_settings(3)
def test_tex(words: list[str]) -> None:
    allowed = (
        commands("".join(LATEX_ESCAPES.values())) | {f"\\{mark}" for mark in LATEX_ACCENTS.values()} | {"\\i", "\\j"}
    )
    for view in VIEWS:
        tex, plain = (to_tikz(make_sentence(item).do(c=0).picture(**view)) for item in (words, ["a", "b", "d", "e"]))
        assert commands(tex) - commands(plain) <= allowed and tex.isascii() and "^^" not in tex
        assert tex.count("\n") == plain.count("\n")


# markup


class PageReader(HTMLParser):
    """The tags and attributes of a page, and the texts of its body and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        self.within = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.within = dict(attrs).get("id") or tag if tag in ("script", "title") else ""
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.texts[self.within] = self.texts.get(self.within, "") + data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    unknown_decl = handle_pi = handle_comment


@given(SURROGATE_WORDS)
@make_settings(4)
def test_pages(words: list[str]) -> None:
    s, plain = make_sentence(words), make_sentence(["a", "b", "d", "e"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bnet_transformer.page.html.bundle_script", lambda last: "")
        result, expected = (PageReader(_page(item, title)) for item, title in ((s, words[0] or " "), (plain, "a")))
    assert (result.tags, result.attributes) == (expected.tags, expected.attributes)
    description = json.loads(result.texts["bnet-description"])
    assert description["stacks"][0]["words"] == [format_token(word) for word in words]
    assert result.texts["title"].startswith(escape_invisible(words[0]))
    assert "\u202e" not in result.texts["bnet-description"]


def _page(s: bt.Sentence, title: str) -> str:
    written: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bnet_transformer._core.files.atomic_write", _MemoryFile(written))
        s.draw("a.html", title=title)
    return written[0].decode()


class _MemoryFile:
    """A file in memory."""

    def __init__(self, written: list[bytes]) -> None:
        self.written = written

    def __call__(self, path: object) -> _MemoryFile:
        return self

    def __enter__(self) -> _MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def write_bytes(self, data: bytes) -> None:
        self.written.append(data)


TABLE_TAGS = {"p", "br", "div", "table", "thead", "tbody", "tr", "th", "td"}


@given(WORDS)
@make_settings(3)
def test_tables_of_a_notebook(words: list[str]) -> None:
    s = make_sentence(words)
    done = s.do(c=0)
    results: list[Any] = [done.reads(residual=0), s.tan(boxes="words"), done.tan_tree(slice=0), done.sample(2, seed=0)]
    for result in results:
        reader = PageReader(result._repr_html_())
        assert set(reader.tags) <= TABLE_TAGS and set(reader.attributes) <= {"border", "class", "style"}
    table = PageReader(results[0]._repr_html_())
    # pandas strips labels
    assert all(word.strip().replace("\0", "\ufffd") in table.texts[""] or "\0" in word for word in words)


# a terminal


def test_a_terminal_gets_only_text(tmp_path: Path) -> None:
    """Labels can come with a file from another author: they must not set a title, clear the screen or turn the line."""
    words = ["\x1b]0;x\x07", "\x1b[2J", "\u202eb", "a\rb", "\x9bc"]
    observe = bt.tpm.Categorical(5, labels=words)
    path = tmp_path / "net.safetensors"
    bt.bayesuvius(2, heads=2, vocabulary=["the", *words[:3], "a"], observe=observe).save(path)
    for arguments in (
        ["ask", "posterior", "y_0", "the a", "-m", path],
        ["ask", "posterior", "y_0", "the a", "-m", path, "--given", "y_1=b"],
        ["ask", "posterior", "y_0", "the dog", "-m", path],
    ):
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], color=True)
        assert result.exit_code in (0, 2) and "\\x1b" in result.output.replace("\\u202e", "\\x1b")
        assert not set(result.output) & set("\x1b\x07\u202e\r\x9b")

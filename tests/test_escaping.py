"""Whatever a word is, in every export it stays a word: a reader of someone else's gives it back, and nothing is run.

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
from bnet_transformer.bridges.networkx import to_graphml, to_json
from bnet_transformer.cli import main, outputs
from bnet_transformer.figures.dot import to_dot
from bnet_transformer.figures.labels import escape_invisible, format_token
from bnet_transformer.figures.svg import to_svg
from bnet_transformer.figures.tikz import LATEX_ACCENTS, LATEX_ESCAPES, escape_tex, to_tikz
from tests.test_export_discrete import label_of

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
UNSEEN = ["\n", "\r", "\t", "\0", "\u2028", "\u202e", "\ufeff", "\ufffe", "\x85", " ", "\u00a0"]
PIECES = st.sampled_from([*MARKUP, *TEX, *DOT, *SHELL, *UNSEEN, "é", "ï", "中", "😀", "a"])
WORD = st.lists(PIECES | st.characters(codec="utf-8"), min_size=1, max_size=3).map("".join)
WORDS = st.lists(WORD, min_size=4, max_size=4, unique=True)
HALVES = st.lists(WORD | st.sampled_from(["\ud800", "a\udfff"]), min_size=4, max_size=4, unique=True)


def law(examples: int) -> settings:
    """So many lists of words, the same ones every time."""
    passed = {"suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}
    return settings(max_examples=examples, derandomize=True, database=None, deadline=None, **passed)


def said(words: list[str]) -> bt.Sentence:
    """A sentence of these words, which are its vocabulary and the labels of what is observed, too."""
    observe = bt.tpm.Categorical(len(words), labels=tuple(words))
    return bt.bayesuvius(2, heads=2, vocabulary=words, observe=observe).sentence(words)


# data


@given(HALVES)
@law(6)
def test_json_and_graphml(words: list[str]) -> None:
    graph = said(words).graph()
    expected = {name: token for name, token in graph.nodes(data="token") if token is not None}
    result = {node["id"]: node["token"] for node in json.loads(to_json(graph))["nodes"] if node["token"] is not None}
    assert result == expected
    back = nx.read_graphml(io.BytesIO(to_graphml(graph).encode()))
    assert set(back) == set(graph)
    for name, token in expected.items():
        read = back.nodes[name]["token"]
        quoted = len(read) > 1 and read[0] == read[-1] == '"'
        assert (json.loads(read) if quoted else read) == token


@given(HALVES)
@law(1)
def test_bif(words: list[str]) -> None:
    from pgmpy.readwrite import BIFReader

    text = said(words).net.sentence(words[:1]).to_bif()  # pgmpy takes seconds for a few tables
    assert text.isascii()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = BIFReader(string=text).get_model()
    assert [label_of(state) for state in result.get_cpds("y_0").state_names["y_0"]] == words
    assert set(result.nodes) == {"c", "y_0"}


@given(WORDS)
@law(30)
def test_tables_as_csv(words: list[str]) -> None:
    import pandas as pd

    table = pd.DataFrame({"word": words, "share": range(len(words))})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        outputs.CommandResult({}, (), lambda: table).write(str(path), {})
        rows = list(csv.reader(io.StringIO(path.read_bytes().decode(), newline="")))
    assert rows == [["word", "share"], *([word, str(k)] for k, word in enumerate(words))]


# pictures

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = {"svg", "title", "desc", "style", "rect", "g", "path", "circle", "text", "tspan"}
VIEWS: list[dict[str, Any]] = [{"detail": "words"}, {"detail": "nodes", "weights": False}]


@given(HALVES)
@law(4)
def test_svg(words: list[str]) -> None:
    s = said(words).do(c=0)
    for view in VIEWS:
        root = ElementTree.fromstring(to_svg(s.picture(**view)))
        assert {item.tag.removeprefix(SVG) for item in root.iter()} <= DRAWN
        assert not [name for item in root.iter() for name in item.attrib if name.startswith("on") or "href" in name]
        passed = "\n".join("".join(item.itertext()) for item in root.iter(f"{SVG}text"))
        assert all(format_token(word) in passed for word in words)
        titles = "\n".join(str(item.text) for item in root.iter(f"{SVG}title"))
        assert all(f"\nx_0_{k} “{format_token(word, None)}”" in titles for k, word in enumerate(words))


@pytest.mark.slow
@given(HALVES)
@law(2)
def test_dot(words: list[str]) -> None:
    """Graphviz reads backslashes in labels, and in tooltips twice; `pydot` gives both as they are written."""
    import pydot

    def once(text: str) -> str:
        return re.sub(r"\\(.)", r"\1", text)

    def nodes_of(part: Any) -> Iterator[Any]:
        yield from part.get_nodes()
        for inner in part.get_subgraphs():
            yield from nodes_of(inner)

    s = said(words).do(c=0)
    for view in VIEWS:
        (samples,) = pydot.graph_from_dot_data(to_dot(s.picture(**view)))
        nodes = {once(node.get_name()[1:-1]): node for node in nodes_of(samples) if node.get("label")}
        for k, word in enumerate(words):
            node = nodes[f"x_0_{k}"]
            label = "".join(ElementTree.fromstring(f"<p>{node.get('label')[1:-1]}</p>").itertext())
            assert f"“{format_token(word, None if view['detail'] == 'words' else 16)}”" in once(label)
            tooltip = once(once(node.get("tooltip")[1:-1])).replace("&amp;", "&")
            assert tooltip.startswith(f"x_0_{k} “{format_token(word, None)}”")


PLAIN = set(string.printable) - set(LATEX_ESCAPES) - set("\t\n\r\x0b\x0c")
BACK = {text: letter for letter, text in LATEX_ESCAPES.items() if letter != "’"}
SPELLED = "|".join(map(re.escape, sorted(BACK, key=len, reverse=True)))
ONE = re.compile(
    rf"(?P<special>{SPELLED})|\\bnetletter\{{(?P<code>[0-9A-F]+)\}}|\\(?P<mark>.)\{{\\?(?P<base>[A-Za-z])\}}"
)


def tex_read(text: str) -> str:
    """What TeX shows of a text that has nothing but letters and the commands for letters."""
    result, at = "", 0
    while at < len(text):
        one = ONE.match(text, at)
        if one is None:
            assert text[at] in PLAIN, text[at:]
            result, at = result + text[at], at + 1
            continue
        marks = {mark: accent for accent, mark in LATEX_ACCENTS.items()}
        if one["special"]:
            result += BACK[one["special"]]
        elif one["code"]:
            result += chr(int(one["code"], 16))
        else:
            result += unicodedata.normalize("NFC", one["base"] + marks[one["mark"]])
        at = one.end()
    return result


@given(HALVES)
@law(200)
def test_letters_of_tex(words: list[str]) -> None:
    for word in words:
        assert tex_read(escape_tex(word)) == word.replace("’", "'")


def commands(tex: str) -> set[str]:
    """The control sequences of a text."""
    return set(re.findall(r"\\(?:[A-Za-z]+|.)", tex))


@given(HALVES)
@law(3)
def test_tex(words: list[str]) -> None:
    allowed = (
        commands("".join(LATEX_ESCAPES.values())) | {f"\\{mark}" for mark in LATEX_ACCENTS.values()} | {"\\i", "\\j"}
    )
    for view in VIEWS:
        tex, plain = (to_tikz(said(item).do(c=0).picture(**view)) for item in (words, ["a", "b", "d", "e"]))
        assert commands(tex) - commands(plain) <= allowed and tex.isascii() and "^^" not in tex
        assert tex.count("\n") == plain.count("\n")


# markup


class Tags(HTMLParser):
    """The tags and attributes of a page, its text, and what stands in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.told: dict[str, str] = {}
        self.within = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.within = dict(attrs).get("id") or tag if tag in ("script", "title") else ""
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.told[self.within] = self.told.get(self.within, "") + data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    unknown_decl = handle_pi = handle_comment


@given(HALVES)
@law(4)
def test_pages(words: list[str]) -> None:
    s, plain = said(words), said(["a", "b", "d", "e"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bnet_transformer.page.render.bundle_script", lambda last: "")
        result, other = (Tags(_page(item, title)) for item, title in ((s, words[0] or " "), (plain, "a")))
    assert (result.tags, result.attributes) == (other.tags, other.attributes)
    about = json.loads(result.told["bnet-description"])
    assert about["stacks"][0]["words"] == [format_token(word) for word in words]
    assert result.told["title"].startswith(escape_invisible(words[0]))
    assert "\u202e" not in result.told["bnet-description"]


def _page(s: bt.Sentence, title: str) -> str:
    held: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bnet_transformer._core.files.atomic_write", _Held(held))
        s.draw("a.html", title=title)
    return held[0].decode()


class _Held:
    """A file that is kept in memory."""

    def __init__(self, held: list[bytes]) -> None:
        self.held = held

    def __call__(self, path: object) -> _Held:
        return self

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def write_bytes(self, data: bytes) -> None:
        self.held.append(data)


SHOWN = {"p", "br", "div", "table", "thead", "tbody", "tr", "th", "td"}


@given(WORDS)
@law(3)
def test_tables_of_a_notebook(words: list[str]) -> None:
    s = said(words)
    set_ = s.do(c=0)
    results: list[Any] = [set_.reads(residual=0), s.tan(boxes="words"), set_.tan_tree(slice=0), set_.sample(2, seed=0)]
    for result in results:
        answer = Tags(result._repr_html_())
        assert set(answer.tags) <= SHOWN and set(answer.attributes) <= {"border", "class", "style"}
    table = Tags(results[0]._repr_html_())
    assert all(word.replace("\0", "\ufffd") in table.told[""] or "\0" in word for word in words)


# a terminal


def test_a_terminal_is_told_no_more_than_text(tmp_path: Path) -> None:
    """Labels come with a file that somebody else wrote: none may set a title, clear the screen or turn the line."""
    words = ["\x1b]0;x\x07", "\x1b[2J", "\u202eb", "a\rb", "\x9bc"]
    observe = bt.tpm.Categorical(5, labels=words)
    path = tmp_path / "net.safetensors"
    bt.bayesuvius(2, heads=2, vocabulary=["the", *words[:3], "a"], observe=observe).save(path)
    for query in (
        ["ask", "posterior", "y_0", "the a", "-m", path],
        ["ask", "posterior", "y_0", "the a", "-m", path, "--given", "y_1=b"],
        ["ask", "posterior", "y_0", "the dog", "-m", path],
    ):
        result = CliRunner().invoke(main, [str(item) for item in query], color=True)
        assert result.exit_code in (0, 2) and "\\x1b" in result.output.replace("\\u202e", "\\x1b")
        assert not set(result.output) & set("\x1b\x07\u202e\r\x9b")

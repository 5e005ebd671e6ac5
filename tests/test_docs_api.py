"""The API pages: every public name is on exactly one, indexes link every page, docstrings have examples."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import bnet_transformer as bt

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted((DOCS / "api").glob("*.md"))
ENTRY = re.compile(
    r"^\.\. (?:auto(?:class|exception|function|method|property|module)|py:data):: bnet_transformer\.([\w.]+)"
)
PACKAGES = [
    *("attention.heads", "bridges.pyro", "compiler", "cost", "interventions.circuits", "interventions.sweeps"),
    *("learning.fit", "learning.training", "models", "pretrained", "tpm"),
]
# Of these packages users hold a part.
PUBLIC_NAMES = {
    "attention": ["CorpusTan", "Damage", "Inclusion", "Path", "Reads", "Tan", "TanTree", "damage"],
    "data": ["Batch", "Dataset"],
    "equations": ["Equation", "Equations", "equations"],
    "figures": ["Picture"],
    "graph": ["Quotient", "Separation", "Trail"],
    "inference": ["Evidence", "Samples", "SentenceState", "log_evidence", "posterior"],
    "interventions": ["Attend", "Mean", "Noise", "Zero"],
    "interventions.counterfactual": ["Counterfactual"],
}
# Their examples would need a file of Julia's, a model of a library that is not in the core, or an open notebook.
ELSEWHERE = {"load_geometric", "Sentence.widget"}


def iter_entries():
    """The page of each entry, and its name after `bnet_transformer.`."""
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if match := ENTRY.match(line):
                yield page.stem, match[1]


def resolve_entry(name):
    """The object that an entry names, or a class of the package and the name of its member."""
    obj, path = bt, "bnet_transformer"
    for part in name.split("."):
        if inspect.isclass(obj):
            assert hasattr(obj, part)
            return obj, part
        path = f"{path}.{part}"
        obj = getattr(obj, part) if hasattr(obj, part) else importlib.import_module(path)
    return obj


def list_members(owner):
    """The public members of a class."""
    return [name for name in dir(owner) if not name.startswith("_")]


def test_every_public_name_stands_on_one_page():
    pages = {}
    for page, name in iter_entries():
        obj = resolve_entry(name)
        identity = obj if isinstance(obj, tuple) else id(obj)
        assert identity not in pages, f"{name} stands on {pages.get(identity)} and {page}"
        pages[identity] = page
    expected = {f"bt.{name}": getattr(bt, name) for name in bt.__all__}
    for package in PACKAGES:
        module = importlib.import_module(f"bnet_transformer.{package}")
        expected |= {f"{package}.{name}": getattr(module, name) for name in module.__all__}
    for package, names in PUBLIC_NAMES.items():
        module = importlib.import_module(f"bnet_transformer.{package}")
        expected |= {f"{package}.{name}": getattr(module, name) for name in names}
    assert [name for name, obj in expected.items() if id(obj) not in pages] == []
    for owner in (bt.BNet, bt.Sentence):
        assert [name for name in list_members(owner) if (owner, name) not in pages] == []


@pytest.mark.parametrize("folder", ["adr", "api", "benchmarks", "experiments"])
def test_an_index_links_every_page_of_its_folder(folder):
    index = (DOCS / folder / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", index))
    assert linked == {page.name for page in (DOCS / folder).glob("*.md")} - {"index.md"}


def test_the_front_page_leads_to_every_page():
    front = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^(\w+)$", front, re.MULTILINE))
    linked = set(re.findall(r"\]\((\w+)\.md\)", front))
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert listed >= pages and linked >= pages


def iter_public_functions():
    for name in bt.__all__:
        function = getattr(bt, name)
        if inspect.isfunction(function):
            yield name, function
    for owner in (bt.BNet, bt.Sentence):
        for name in list_members(owner):
            yield f"{owner.__name__}.{name}", inspect.getattr_static(owner, name)


def test_every_public_function_has_an_example():
    """In its docstring, or among the blocks of its page, which tests/test_docs.py runs."""
    examples = "".join(
        block
        for name in ("net", "sentence", "files")
        for block in re.findall(r"^```python\n(.*?)^```", (DOCS / "api" / f"{name}.md").read_text(), re.M | re.S)
    )
    missing = []
    for name, function in iter_public_functions():
        inner = getattr(function, "fget", None) or getattr(function, "func", None) or function
        last = name.rsplit(".", 1)[-1]
        has_example = ">>>" in (inspect.getdoc(inner) or "") or re.search(rf"\.{last}\b", examples)
        missing += [name] if not has_example and name not in ELSEWHERE else []
    assert missing == []


def test_docstrings_document_every_argument(scripts):
    public_objects = importlib.import_module("public_objects")
    faults = {name: public_objects.find_undocumented(obj) for name, obj in public_objects.iter_public_objects()}
    assert len(faults) > 380
    assert {name: missing for name, missing in faults.items() if missing} == {}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "scripts")


def test_broken_links_of_the_site_are_found(scripts, tmp_path):
    check_site = importlib.import_module("check_site")
    (tmp_path / "b.html").write_text('<p id="here"><a name="there">b</a>')
    valid = '<a href="b.html#here">1</a><a href="b.html#there">2</a><a href="#top" id="top">3</a><a href="https://a.b">4</a>'
    (tmp_path / "a.html").write_text(valid)
    assert check_site.find_faults(tmp_path) == ([], 2, 4, 1)
    bad = '<a href="c.html"></a><a href="b.html#gone"></a><img src="d.png"><a href="../e.html"></a><script src="//x">'
    (tmp_path / "a.html").write_text(bad)
    check_site.read_page.cache_clear()
    faults = check_site.find_faults(tmp_path)[0]
    expected = ["no such file", "no such anchor", "leads out of the site", "no such file", "fetched from the web"]
    assert [line.rsplit(": ", 1)[1] for line in faults] == expected


LEFT = "<p>a & b \\c</p><math><mrow>{}</mrow></math><p>\\d</p>"


@pytest.mark.parametrize(
    ("inside", "left"),
    [
        ("<mi>a</mi><mi>&</mi><mi>b</mi>", "&"),
        ("<mi>&amp;</mi>", "&"),
        ("<mi>\\foo</mi>", "\\foo"),
        ("<mtext>\\foo</mtext>", "\\foo"),
        ('<mspace linebreak="newline" /><mi>d</mi>', "\\\\"),
        ("<mi>a</mi><mi /><mtext>a & b</mtext><mtext>&</mtext>", None),
    ],
)
def test_latex_that_is_left_in_a_formula_is_found(scripts, tmp_path, inside, left):
    check_site = importlib.import_module("check_site")
    (tmp_path / "a.html").write_text(LEFT.format(inside))
    expected = [f"a.html: {left}: LaTeX that is left in a formula"] if left else []
    assert check_site.find_faults(tmp_path)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("display", ["inline", "block"])
def test_formulas_of_the_site_are_whole(scripts, tmp_path, display):
    """All that the package writes, and the rows of a net as a table of two columns."""
    rendering = pytest.importorskip("rendering", reason='Sphinx: pip install "bnet-transformer[docs]"')
    check_site = importlib.import_module("check_site")
    nets = [bt.bayesuvius(dim=4, heads=3), bt.volume_preserving(3), bt.encoder_decoder()]
    for k, net in enumerate(nets):
        equations = net.equations()
        formula = rendering.to_mathml(equations._repr_latex_().strip("$\n"), display)
        assert len(re.findall("<mtr>", formula)) > len(equations.rows)
        assert len(re.findall("<mtd", formula)) == 2 * len(re.findall("<mtr>", formula))
        (tmp_path / f"{k}.html").write_text(formula)
    assert check_site.find_faults(tmp_path)[0] == []


def test_docstrings_become_restructured_text(scripts):
    rendering = pytest.importorskip("rendering", reason='Sphinx: pip install "bnet-transformer[docs]"')
    docstring = "What `s[x_]` *is*, P(j | i).\n\nAs `Sentence`:\n\n    a_b\n\n>>> 1 | 2\n3"
    expected = [
        r"What \ ``s[x_]``\  \*is\*, P(j \| i).",
        "",
        r"As \ :py:obj:`Sentence <bnet_transformer.Sentence>`\ :",
        *("", "::", "", "        a_b", "", ">>> 1 | 2", "3", ""),
    ]
    assert list(rendering.plain_to_rst(docstring.splitlines())) == expected

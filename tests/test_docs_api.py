"""The API reference has every public name once; indexes link every page; docstrings have examples and arguments."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import bnet_transformer as bt

DOCS = Path(__file__).resolve().parents[1] / "docs"
# All that these packages export is public.
PACKAGES = [
    *("compiler", "cost", "generation", "learning.fit", "learning.training", "models", "pretrained", "programs", "tpm")
]
# What users receive or pass, of other packages.
PUBLIC_NAMES = {
    "attention": ["CorpusTan", "Damage", "Inclusion", "Path", "Reads", "Roles", "Tan", "TanTree", "damage"],
    "bridges.pyro": ["PyroModel"],
    "data": ["Batch", "Dataset"],
    "equations": ["Equation", "Equations", "equations"],
    "figures": ["Picture"],
    "graph": ["Quotient", "Separation", "Trail"],
    "inference": [
        *(
            "Evidence",
            "GroupPosterior",
            "GroupStates",
            "PerformanceWarning",
            "RankedStates",
            "Samples",
            "SentenceState",
        ),
        *("log_evidence", "posterior"),
    ],
    "interventions": ["Attend", "Mean", "Noise", "Zero"],
    "interventions.circuit": ["Circuit", "CircuitTests", "FaithfulnessWarning", "StoredCircuit", "read_json"],
    "interventions.counterfactual": ["Counterfactual"],
    "interventions.curves": ["FaithfulnessCurves"],
    "interventions.sweep_results": ["EstimateCalibration", "Mediation", "Sweep"],
}
# Their examples would need a file that another program writes, or an open notebook.
WITHOUT_EXAMPLE = {"load_geometric", "Sentence.widget"}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "scripts")


def test_every_public_name_is_in_the_reference_once(scripts):
    public_objects = importlib.import_module("public_objects")
    paths = {}
    for path in public_objects.list_reference():
        obj = public_objects.import_entry(path)
        assert id(obj) not in paths, f"{path} and {paths[id(obj)]} are the same object"
        paths[id(obj)] = path
    expected = {name: obj for name, obj in public_objects.iter_public_objects() if inspect.isclass(obj)}
    expected |= public_objects.collect_exports()
    for package in PACKAGES:
        module = importlib.import_module(f"bnet_transformer.{package}")
        expected |= {f"{package}.{name}": getattr(module, name) for name in module.__all__}
    for package, names in PUBLIC_NAMES.items():
        module = importlib.import_module(f"bnet_transformer.{package}")
        expected |= {f"{package}.{name}": getattr(module, name) for name in names}
    documented = {name: obj for name, obj in expected.items() if inspect.isclass(obj) or inspect.isfunction(obj)}
    assert [name for name, obj in documented.items() if id(obj) not in paths] == []
    assert set(paths) == {id(obj) for obj in documented.values()}
    tables = {name for name, obj in expected.items() if isinstance(obj, dict)}
    page = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\.\. py:data:: ([\w.]+)$", page, re.MULTILINE)) == tables


def test_members_of_the_reference_have_a_page(scripts):
    """Each public method and property is a member of a class of the reference, inherited ones too."""
    public_objects = importlib.import_module("public_objects")
    for owner, expected in (
        (bt.Sentence, {"posterior", "parents", "__getitem__"}),
        (bt.BNet, {"parents", "sentence"}),
        (bt.tpm.Linear, set()),
        (importlib.import_module("bnet_transformer.attention").Reads, {"save", "paths"}),
    ):
        members = {name for name, _ in public_objects.iter_members(owner)}
        assert members >= expected
    assert not {name for name, _ in public_objects.iter_members(bt.tpm.Linear)} & set(dir(bt.tpm.TPM))


@pytest.mark.parametrize("folder", ["adr", "benchmarks", "experiments"])
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
        for name in dir(owner):
            if not name.startswith("_"):
                yield f"{owner.__name__}.{name}", inspect.getattr_static(owner, name)


def test_every_public_function_has_an_example():
    """In its docstring, or in a page, whose blocks tests/test_docs.py runs."""
    examples = "".join(
        block
        for page in DOCS.glob("*.md")
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    )
    missing = []
    for name, function in iter_public_functions():
        inner = getattr(function, "fget", None) or getattr(function, "func", None) or function
        last = name.rsplit(".", 1)[-1]
        has_example = ">>>" in (inspect.getdoc(inner) or "") or re.search(rf"\.{last}\b", examples)
        missing += [name] if not has_example and name not in WITHOUT_EXAMPLE else []
    assert missing == []


def test_docstrings_document_every_argument(scripts):
    public_objects = importlib.import_module("public_objects")
    faults = {name: public_objects.find_undocumented(obj) for name, obj in public_objects.iter_public_objects()}
    assert len(faults) > 380
    assert {name: missing for name, missing in faults.items() if missing} == {}


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
    faults = [fault.rpartition(": ")[0] for fault in check_site.find_faults(tmp_path)[0]]
    assert faults == ([f"a.html: {left}"] if left else [])


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


def test_sections_of_docstrings_become_fields(scripts):
    """Code within a section is code; the name of an argument and the text before a colon stay whole."""
    rendering = pytest.importorskip("rendering", reason='Sphinx: pip install "bnet-transformer[docs]"')
    napoleon = pytest.importorskip("sphinx.ext.napoleon")
    lines = ["Args:", "    x_: A `[n]` array:", "        a_b.", "    **options: All others.", "", "Returns:"]
    lines += ["    A pair: `a`, b.", "", "Raises:", "    BNetError: If `x` is bad.", "", ">>> 1"]
    text = str(napoleon.GoogleDocstring(list(rendering.plain_to_rst(lines)), napoleon.Config(), what="function"))
    expected = [
        *(r":param x_: A \ ``[n]``\  array:", r"           a\_b."),
        *(r":param \*\*options: All others.", "", r":returns: A pair: \ ``a``\ , b.", ""),
        *(r":raises BNetError: If \ ``x``\  is bad.", "", ">>> 1"),
    ]
    assert text.rstrip().splitlines() == expected

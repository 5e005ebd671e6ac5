"""The widget: messages of the front end have the effect of `do`; and the output where widgets cannot run."""

import base64
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions import Zero
from bnet_transformer.tpm import Categorical
from tests.browser_page import needs_chromium, open_browser_page
from tests.test_page import unpack_bit_table

pytest.importorskip("anywidget", reason='the widget: pip install "bnet-transformer[notebook]"')

WORDS = "the cat sat on the mat"


@pytest.fixture(scope="module")
def watched():
    with open_browser_page() as watched:
        yield watched


@pytest.fixture(scope="module")
def concat():
    """A sentence in a net with a plate of heads."""
    return bt.bayesuvius(6, slices=2, heads=3, combine="concat", residual=True).sentence(WORDS)


@pytest.fixture(scope="module")
def select():
    """A sentence whose heads are states of c, with a readout of each word."""
    return bt.bayesuvius(6, slices=2, heads=3, observe=Categorical(5)).sentence(WORDS)


class WidgetHarness:
    """A widget without a kernel: `send` passes a message to it and records its reply."""

    def __init__(self, sentence, monkeypatch, **options):
        self.widget = sentence.widget(**options)
        self.answers = []
        monkeypatch.setattr(self.widget, "send", lambda content, buffers=None: self.answers.append(content))

    def send(self, **content):
        self.widget._handle_custom_msg({"id": len(self.answers) + 1, **content}, [])
        assert self.answers[-1]["id"] == len(self.answers)
        return self.answers[-1].get("error")


def unpack_slice(description, buffer, slice_, slot=0):
    """Return `P(j | i)` of a slice in the page, `[plate, word, word]`, from the description and the buffer."""
    item = next(r for r in description["attention"] if description["groups"][r["group"]]["step"] == slice_)
    mask = unpack_bit_table(description, buffer, item["mask"])
    size = int(mask.sum()) * item["num_plates"]
    values = np.frombuffer(buffer, np.uint8)[item["offset"] + slot * size :][:size].reshape(item["num_plates"], -1)
    table = np.zeros((item["num_plates"], *mask.shape))
    table[:, mask] = values / description["quantization_steps"]
    return table


def check_attention(widget, sentence, slices=(0, 1)):
    """Check that the traits of a widget contain the attention of a sentence, to the resolution of the page."""
    for slice_ in slices:
        expected = sentence.attention(slice_).detach().reshape(-1, len(sentence.words), len(sentence.words)).numpy()
        actual = unpack_slice(widget.description, widget.buffer, slice_)
        assert np.abs(actual - expected).max() <= 0.5 / widget.description["quantization_steps"] + 1e-6


def test_switching_a_head_off_is_do_and_back(concat, monkeypatch):
    harness = WidgetHarness(concat, monkeypatch)
    check_attention(harness.widget, concat)
    assert harness.send(do=[["a_0_1_*", {"set": "zero"}]]) is None
    without = concat.do({"a_0_1_*": Zero()})
    torch.testing.assert_close(harness.widget.sentence["x_2_3"], without["x_2_3"])
    assert not torch.allclose(without["x_2_3"], concat["x_2_3"])
    check_attention(harness.widget, without, [1])
    assert set(harness.widget.description["interventions"]) == {f"a_0_1_{i}" for i in range(6)}
    assert harness.send(undo=["a_0_1_*"]) is None
    check_attention(harness.widget, concat)
    assert not harness.widget.description["interventions"]


def test_contributions_are_those_of_the_sentence_before_interventions(concat, monkeypatch):
    result = concat.contributions("x_2_3", of=torch.ones(6))
    harness = WidgetHarness(concat, monkeypatch, contributions=result)
    assert [item["node"] for item in harness.widget.description["contributions"]] == ["x_2_3"]
    assert harness.send(do=[["a_0_1_*", {"set": "zero"}]]) is None
    assert harness.widget.description["contributions"] == []
    assert harness.send(undo=[]) is None
    assert len(harness.widget.description["contributions"]) == 1


def test_the_initial_view_does_not_depend_on_interventions(concat):
    descriptions = [s.widget().description for s in (concat, concat.do(x_1_2=0.0))]
    assert descriptions[0]["counts"][1] > descriptions[1]["counts"][1]
    assert {d["declared_arrows"] for d in descriptions} == {descriptions[0]["counts"][1]}


def test_a_selector_is_set_to_a_state(select, monkeypatch):
    harness = WidgetHarness(select, monkeypatch)
    assert harness.send(do=[["c", {"set": "state", "state": 2}]]) is None
    expected = select.do(c=2)
    check_attention(harness.widget, expected)
    assert harness.send(do=[["x_1_0", {"set": "node", "from": "x_1_5"}]]) is None
    patched = expected.do(x_1_0=expected["x_1_5"])
    torch.testing.assert_close(harness.widget.sentence["x_2_3"], patched["x_2_3"])
    check_attention(harness.widget, patched, [1])
    before = expected.attention(0).detach().numpy()
    actual = unpack_slice(harness.widget.description, harness.widget.buffer, 0)[0]
    assert not actual[0].any()  # a node that is set attends to nothing
    assert np.abs(actual[1:] - before[1:]).max() < 0.002


REFUSED = [
    {},
    {"do": [["c", {"set": "state", "state": 3}]]},
    {"do": [["c", {"set": "zero"}]]},
    {"do": [["x_1_0", {"set": "node", "from": "x_1_1"}]]},  # c is latent: the value has a state for each head
    {"undo": ["c"]},
]


def test_failed_actions_are_reported_and_change_nothing(select, monkeypatch):
    harness = WidgetHarness(select, monkeypatch)
    before = harness.widget.description, harness.widget.buffer
    for content in REFUSED:
        assert harness.send(**content), content
        assert harness.widget.sentence is select, content
        assert (harness.widget.description, harness.widget.buffer) == before, content


def test_an_error_is_sent_to_the_page_and_raised(select, monkeypatch):
    harness = WidgetHarness(select, monkeypatch)

    def fails(sentence):
        raise RuntimeError("out of memory")

    harness.widget._describe = fails
    with pytest.raises(RuntimeError):
        harness.widget._handle_message(None, {"id": 1, "undo": []}, [])
    assert harness.answers == [{"id": 1, "error": "out of memory"}]
    assert harness.widget.sentence is select


def test_the_state_shows_the_same_page_in_another_widget(concat, monkeypatch):
    harness = WidgetHarness(concat, monkeypatch, detail="words")
    changes = []
    harness.widget.observe(lambda change: changes.append((change["name"], change["new"])), ["selected", "sentence"])
    assert harness.widget.state == {"steps": [], "selected": None, "view": {}}
    harness.send(do=[["a_0_1_*", {"set": "zero"}]])
    harness.send(do=[["x_1_2", {"set": "node", "from": "x_1_4"}]])
    harness.send(undo=["a_0_1_*"])  # the value of x_1_2 remains that without the head
    harness.widget.selected = "a_1_*_2"
    harness.widget.set_state({"view": {"head": 2, "unfolded": [1], "min_weight": 0.2}})  # as the front end does
    state = harness.widget.state
    other = concat.widget(detail="nodes")
    other.state = json.loads(json.dumps(state))
    assert (
        other.state == state and other.selected == "a_1_*_2" and other.description["interventions"].keys() == {"x_1_2"}
    )
    expected = concat.do(x_1_2=concat.do({"a_0_1_*": Zero()})["x_1_4"])
    torch.testing.assert_close(other.sentence["x_2_2"], expected["x_2_2"])
    check_attention(other, expected, [1])
    assert [name for name, _ in changes] == ["sentence"] * 3 + ["selected"] and changes[2][1] is harness.widget.sentence
    other.state = {}
    assert other.sentence is concat and other.selected is None and other.view == {}


def test_an_undone_do_is_no_step_unless_it_replaced_another(concat, monkeypatch):
    harness = WidgetHarness(concat, monkeypatch)
    zero, patch = {"do": [["x_1_2", {"set": "zero"}]]}, {"do": [["x_1_2", {"set": "node", "from": "x_1_4"}]]}
    for messages, steps in (
        ([zero, {"undo": ["x_1_2"]}], []),
        ([zero, patch, {"undo": ["x_1_2"]}], [zero, patch, {"undo": ["x_1_2"]}]),
        ([{"undo": []}], []),
    ):
        for message in messages:
            assert harness.send(**message) is None
        assert harness.widget.state["steps"] == steps and harness.widget.description["interventions"] == {}


def test_a_sentence_from_python_is_drawn_and_is_the_new_start(concat, monkeypatch):
    harness = WidgetHarness(concat, monkeypatch)
    harness.send(do=[["x_1_2", {"set": "zero"}]])
    start = harness.widget.sentence.do(x_1_4=Zero())
    harness.widget.sentence = start
    assert harness.widget.description["interventions"].keys() == {"x_1_2", "x_1_4"}
    assert harness.widget.state["steps"] == []
    harness.send(do=[["x_1_0", {"set": "zero"}]])
    harness.send(undo=[])
    assert harness.widget.sentence is start
    check_attention(harness.widget, start, [1])


def test_a_selector_that_is_set_may_have_a_state_in_the_view(select):
    widget = select.widget()
    for steps in ([], [{"do": [["c", {"set": "state", "state": 1}]]}]):
        widget.state = {"steps": steps, "view": {"states": {"c": np.int64(2)}}}
        assert json.loads(json.dumps(widget.state))["view"] == {"states": {"c": 2}}


INVALID = [
    *[("selected", name, "x_0_0 to x_2_5") for name in ("x_9_9", "x_1_6")],
    *[("selected", name, "known name") for name in ("nobody", 3, ["x_1_2"])],
    *[("selected", name, "cannot replace a word") for name in ("x_1_*", "a_0_*_*", "a_*_0_1")],
    *[("view", {"hed": 1}, "head"), ("view", {"head": 3}, "'mean', 'all', 0, 1, 2"), ("view", [1], "a mapping")],
    *[("view", {"unfolded": [2]}, "0, 1"), ("view", {"unfolded": "0"}, "list"), ("view", {"top": -1}, "at least 0")],
    *[("view", {"min_weight": 2}, "from 0 to 1"), ("view", {"states": {"c": 0}}, "selector")],
    *[("view", {"all_words": 1}, "True"), ("view", {"highlight": "cousins"}, "'parents'")],
    *[("state", {"step": []}, "steps"), ("state", {"steps": 3}, "a list of steps"), ("state", "x_1_2", "a mapping")],
    *[("state", {"steps": ["x"]}, "step"), ("state", {"steps": [{"do": 1}]}, "do with names")],
    ("state", {"steps": [{"do": [["x_1_2", {"set": "zero"}]]}], "selected": "x_9_9"}, "x_0_0 to x_2_5"),
    ("state", {"steps": [{"do": [["x_1_2", {"set": "zero"}]]}], "view": {"head": 3}}, "head"),
    *[("sentence", "x_1_2", "a Sentence"), ("sentence", None, "a Sentence"), ("view", None, "a mapping of settings")],
    *[("selected", "*", r"got '\*'"), ("selected", "a_0_*_9", r"got 'a_0_\*_9'"), ("view", {"head": "2"}, "got '2'")],
]


def test_invalid_values_from_python_are_errors_and_change_nothing(concat):
    widget = concat.widget()
    widget.state = {"steps": [{"do": [["x_1_4", {"set": "zero"}]]}], "selected": "x_1_2", "view": {"head": 1}}
    before = widget.state, widget.sentence, widget.description, widget.buffer
    for trait, value, match in [*INVALID, ("sentence", concat.net.sentence("a b"), "the words of this widget")]:
        with pytest.raises(BNetError, match=match):
            setattr(widget, trait, value)
        assert (widget.state, widget.sentence, widget.description, widget.buffer) == before, (trait, value)


def test_without_a_kernel_a_sentence_shows_its_figure(select):
    bundle, _ = select._repr_mimebundle_()
    figure = ElementTree.fromstring(bundle["image/svg+xml"])
    assert bundle["text/plain"] == repr(select)
    assert {group.get("id") for group in figure.iter() if group.get("class") == "node"} >= {"x_0_0", "c"}
    assert set(bundle) == {"text/plain", "image/svg+xml"}


@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is not installed")
def test_a_terminal_gets_one_line(select, monkeypatch):
    import IPython

    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace())
    assert select._repr_mimebundle_() == ({"text/plain": repr(select)}, {})


def test_a_sentence_past_every_limit_still_has_its_line():
    long = bt.bayesuvius(2, slices=1, heads=1).sentence(x=torch.zeros(513, 2))
    with pytest.raises(BNetError):
        long.widget()
    assert long._repr_mimebundle_()[0]["text/plain"] == repr(long)


@pytest.mark.slow  # a kernel starts
def test_in_a_notebook_it_is_a_widget_and_elsewhere_an_svg(tmp_path):
    pytest.importorskip("ipykernel")
    nbconvert = pytest.importorskip("nbconvert")
    from nbconvert.preprocessors import ExecutePreprocessor
    from nbformat.v4 import new_code_cell, new_notebook

    code = 'import bnet_transformer as bt\ns = bt.bayesuvius(4, heads=2).sentence("the <b>cat</b> sat")\ns'
    notebook = new_notebook(cells=[new_code_cell(code), new_code_cell("s.do(c=1).widget()")])
    run = ExecutePreprocessor(timeout=120, kernel_name="python3", store_widget_state=False)
    run.preprocess(notebook, {"metadata": {"path": str(tmp_path)}})
    for cell in notebook.cells:
        (output,) = cell.outputs
        assert set(output["data"]) == {"application/vnd.jupyter.widget-view+json", "image/svg+xml", "text/plain"}
    html, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    figures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert len(figures) == 2
    for figure in figures:
        named = {group.get("id") for group in ElementTree.fromstring(base64.b64decode(figure)).iter()}
        assert named >= {"x_1_2", "c"} and "<b>cat" not in html


@pytest.mark.slow  # a process that imports torch
def test_importing_the_package_does_not_import_anywidget():
    code = "import bnet_transformer as bt, sys; bt.bayesuvius(2).sentence('a b')._repr_mimebundle_()"
    code += "; assert not {'anywidget', 'ipywidgets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


# in a browser, with a simulated notebook front end

CELL = """<!doctype html><html lang="en"><meta charset="utf-8"><title>a cell</title><body><div id="cell"></div>"""
RUN = """async ([script, style, description, buffer]) => {
  const bytes = (text) => new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  const listeners = {}, traits = { description, buffer: bytes(buffer) };
  let unsaved = {};
  const fire = (event, value) => (listeners[event] ?? []).forEach((listener) => listener(value));
  const model = {
    get: (name) => traits[name],
    set: (name, value) => { traits[name] = unsaved[name] = value; fire(`change:${name}`); },
    save_changes: () => { window.toPython({ traits: { ...unsaved } }); unsaved = {}; },
    on: (event, listener) => (listeners[event] ??= []).push(listener),
    off: (event, listener) => { listeners[event] = listeners[event].filter((other) => other !== listener); },
    send: async (content) => {
      const { answer, changed } = await window.toPython(content);
      fire("msg:custom", answer);  // a notebook may hear the answer before its traits have changed
      await new Promise((done) => setTimeout(done, 5));
      for (const [name, value] of Object.entries(changed)) traits[name] = name === "buffer" ? bytes(value) : value;
      for (const name of Object.keys(changed)) fire(`change:${name}`);
    },
  };
  const sheet = new CSSStyleSheet();
  await sheet.replace(style);
  document.adoptedStyleSheets = [sheet];
  const module = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  window.leave = await module.default.render({ model, el: document.getElementById("cell") });
  window.countListeners = () => Object.values(listeners).flat().length;
}"""


@contextlib.contextmanager
def cell(watched, tmp_path, harness):
    """Return the widget in a page; its messages are passed to Python and back."""
    widget, file = harness.widget, tmp_path / "cell.html"
    file.write_text(CELL)

    def get_traits():
        return {"description": widget.description, "buffer": base64.b64encode(widget.buffer).decode()}

    def to_python(content):
        if "traits" in content:
            return widget.set_state(content["traits"])
        before = get_traits()
        harness.send(**{name: value for name, value in content.items() if name != "id"})
        answer = {**harness.answers[-1], "id": content["id"]}
        return {"answer": answer, "changed": {n: value for n, value in get_traits().items() if value != before[n]}}

    with watched.open_file(file, ready="#cell") as page:
        if not hasattr(watched, "to_python"):
            page.expose_function("toPython", lambda content: watched.to_python(content))
        watched.to_python = to_python
        page.evaluate(RUN, [widget._esm, widget._css, *get_traits().values()])
        yield page


def read_weights(page, name, part):
    """Return the attention weights of a word in the panel."""
    page.locator(f'[data-node="{name}"]').click()
    page.wait_for_selector(f'.panel [data-fact="name"]:text-is("{name}")')
    rows = page.locator(f'.panel [data-part="{part}"] tr')
    return dict(
        map(tuple, rows.evaluate_all("rows => rows.map(r => [Number(r.dataset.word), Number(r.dataset.weight)])"))
    )


def check_row(actual, row):
    assert len(actual) == len(row)
    assert all(abs(actual[j] - float(weight)) <= 0.5 / 255 + 6e-5 for j, weight in enumerate(row))


def check_heads_of_a_word(page, widget):
    """A head of which one word is set is neither on nor off, and every head can be switched while another is off."""
    page.locator('[data-command="unfold"]').click()
    page.locator('[name="head"]').select_option("1")
    page.locator('[data-node="a_0_1_2"]').click()
    page.locator('[data-action="zero"]').click()
    page.locator('[data-action="head-1"][aria-pressed="mixed"]').click()
    page.wait_for_selector('[data-action="head-1"][aria-pressed="true"]')
    assert widget.description["interventions"] == {f"a_0_1_{word}": "zero" for word in range(6)}
    page.locator('[name="head"]').select_option("mean")
    page.locator('[data-nodes="a_0_*_2"]').click()
    page.locator('[data-action="head-2"][aria-pressed="false"]').click()
    page.wait_for_selector('[data-action="head-2"][aria-pressed="true"]')
    assert len(widget.description["interventions"]) == 12
    page.keyboard.press("Escape")
    assert page.locator('[data-switch^="a_0_"]').evaluate_all("all => all.map(e => e.ariaPressed)") == [
        "true",
        "false",
        "false",
    ]


@pytest.mark.slow
@needs_chromium
def test_clicks_in_a_notebook_are_do(watched, concat, tmp_path, monkeypatch):
    harness, sat = WidgetHarness(concat, monkeypatch), 2
    with cell(watched, tmp_path, harness) as page:
        page.locator('[data-switch="a_0_1"]').click()  # a head is switched off ...
        page.wait_for_selector('[data-switch="a_0_1"][aria-pressed="false"]')
        assert page.locator('[data-part="do"] li').evaluate_all("all => all.map(e => e.dataset.name)") == ["a_0_1_*"]
        off = concat.do({"a_0_1_*": Zero()})
        check_row(read_weights(page, f"x_2_{sat}", "reads-a_1"), off.attention(1).detach().mean(0)[sat])
        page.locator(f'[data-node="x_1_{sat}"]').click()  # ... a word is patched ...
        page.locator('[data-action="patch"]').select_option("4")
        page.wait_for_selector(".fill-do")
        both = off.do({f"x_1_{sat}": off["x_1_4"]})
        check_row(read_weights(page, "x_2_0", "reads-a_1"), both.attention(1).detach().mean(0)[0])
        torch.testing.assert_close(harness.widget.sentence["x_2_0"], both["x_2_0"])
        page.keyboard.press("Escape")
        page.locator('[data-switch="a_0_1"]').click()  # ... the head is on again ...
        page.wait_for_selector('[data-switch="a_0_1"][aria-pressed="true"]')
        patched = concat.do({f"x_1_{sat}": off["x_1_4"]})
        check_row(read_weights(page, "x_2_5", "reads-a_1"), patched.attention(1).detach().mean(0)[5])
        page.keyboard.press("Escape")
        page.locator('[data-action="undo-all"]').click()  # ... and everything is restored
        page.wait_for_selector(".fill-do", state="detached")
        check_row(read_weights(page, f"x_2_{sat}", "reads-a_1"), concat.attention(1).detach().mean(0)[sat])
        check_heads_of_a_word(page, harness.widget)
        page.evaluate("() => window.leave()")
        assert page.evaluate("() => window.countListeners()") == 0 and not page.locator(".node").count()


@pytest.mark.slow
@needs_chromium
def test_of_many_states_each_button_sets_its_own(watched, tmp_path, monkeypatch):
    sentence = bt.bayesuvius(2, heads=40).sentence("a b")
    logits = {name: torch.linspace(-3, 3, 40) for name in sentence.net.parameters if name == "c.logits"}
    harness = WidgetHarness(sentence.net.replace(logits).sentence("a b"), monkeypatch)
    with cell(watched, tmp_path, harness) as page:
        page.locator('[data-node="c"]').click()
        assert not page.locator('[data-action="state-3"]').count()  # the least probable are not listed
        page.locator('[data-action="state-39"]').click()
        page.wait_for_selector('[data-node="c"] .fill-do')
    assert harness.widget.description["interventions"] == {"c": "39"}


@pytest.mark.slow
@needs_chromium
def test_a_selector_is_clicked_and_a_refusal_is_read(watched, select, tmp_path, monkeypatch):
    harness = WidgetHarness(select, monkeypatch)
    with cell(watched, tmp_path, harness) as page:
        page.locator('[data-node="x_1_0"]').click()
        page.locator('[data-action="patch"]').select_option("5")  # c is latent: a value has a state for each head
        page.wait_for_function("() => document.querySelector('.footer').textContent.includes('x_1_0')")
        assert harness.widget.sentence is select
        assert page.locator('[data-action="patch"]').input_value() == ""
        assert page.locator(".status").inner_text() in page.locator(".footer").inner_text()
        page.locator('[data-node="c"]').click()
        page.locator('[data-action="state-2"]').click()
        page.wait_for_selector('[data-node="c"] .fill-do')
        check_row(read_weights(page, "x_2_4", "reads-x_2"), select.do(c=2).attention(1).detach()[4])

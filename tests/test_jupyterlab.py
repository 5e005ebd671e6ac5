"""The widget in a JupyterLab in Chromium: clicks arrive in Python, changes in Python are drawn, the file has an SVG."""

import importlib.util
import json
import os
import re
import time

import nbformat
import pytest

import bnet_transformer as bt
from bnet_transformer.interventions import Zero
from tests.browser_page import launch_chromium, needs_chromium
from tests.jupyterlab_server import Notebook, run_jupyterlab

pytest.importorskip("anywidget", reason='the widget: pip install "bnet-transformer[notebook]"')
pytestmark = [
    pytest.mark.slow,
    needs_chromium,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("jupyterlab", "ipykernel")),
        reason='JupyterLab is not installed: pip install "bnet-transformer[notebook]"',
    ),
]

WORDS = "the cat sat on the mat"
START = f"""
import json, os
import bnet_transformer as bt
from bnet_transformer.interventions import Zero
s = bt.bayesuvius(6, slices=2, heads=3, combine="concat", residual=True, seed=0).sentence({WORDS!r})
w, selections = s.widget(detail="words"), []
w.observe(lambda change: selections.append(change["new"]), "selected")
w"""
READ_SELECTED = "print(json.dumps([w.selected, selections, os.getpid()]))"
READ_DO = """
same = s.do(x_1_2=Zero())
values = [sentence["x_2_0"].tolist() for sentence in (w.sentence, same)]
print(json.dumps([sorted(w.description["interventions"]), *values, w.state]))"""
STATE = {"steps": [{"do": [["a_0_1_*", {"set": "zero"}]]}], "selected": "x_2_5", "view": {"head": 2}}
CELLS = [
    *(START, READ_SELECTED, READ_DO, 'w.selected = "q_0_*_3"', f"w.state = {STATE!r}", 'w.selected = "x_9_9"'),
    *("w", "w.sentence = w.sentence.do(x_0_0=Zero())", "print(json.dumps(w.state))"),
]


def test_the_widget_in_jupyterlab(tmp_path):
    nbconvert = pytest.importorskip("nbconvert")
    file = tmp_path / "widget.ipynb"
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS]
    kernel = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }  # of the interpreter that runs Jupyter
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), file)
    s = bt.bayesuvius(6, slices=2, heads=3, combine="concat", residual=True, seed=0).sentence(WORDS)
    with run_jupyterlab(tmp_path) as address, launch_chromium() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(120_000)
        requests, faults = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(address.format("lab/tree/widget.ipynb"))
        page.get_by_text("| Idle").wait_for()
        kernel = check_notebook(Notebook(page), s)
        page.keyboard.press("Escape")
        page.keyboard.press("Control+s")
        wait_for_saved(file)
        local = (address.partition("{")[0], "data:", "blob:")
        assert not faults and not [url for url in requests if not url.startswith(local)]
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)
    check_file(file, nbconvert)


def check_notebook(notebook, s):
    """Run the cells and click; return the process id of the kernel."""
    notebook.run(0)
    first = notebook.cell(0)
    # a click on a node arrives in Python
    first.locator('[data-node="x_1_2"]').click()
    wait_for_name(first, "x_1_2")
    selected, selections, kernel = json.loads(notebook.run(1))
    assert selected == "x_1_2" and selections == ["x_1_2"]
    # keys are not shortcuts of the notebook, in which "x" cuts the cell
    first.locator('[data-node="x_1_2"]').click()
    for key in ("x", "h", "x", "h", "a"):
        notebook.page.keyboard.press(key)
    assert notebook.page.locator(".jp-Notebook-cell").count() == len(CELLS)
    # a `do` in the page is that of the sentence
    first.locator('[data-action="zero"]').click()
    first.locator('[data-node="x_1_2"] .fill-do').wait_for()
    interventions, actual, same, state = json.loads(notebook.run(2))
    after = s.do(x_1_2=Zero())
    assert interventions == ["x_1_2"] and actual == same == pytest.approx(after["x_2_0"].tolist(), abs=1e-5)
    assert state == {"steps": [{"do": [["x_1_2", {"set": "zero"}]]}], "selected": "x_1_2", "view": {}}
    first.locator('[data-node="x_2_0"]').click()
    wait_for_name(first, "x_2_0")
    check_reads(first, after.attention(1).detach().mean(0)[0])
    # colours are those of JupyterLab's theme, and not of the system
    notebook.page.emulate_media(color_scheme="dark")
    assert read_colour_scheme(first) == "light"
    notebook.page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    notebook.page.emulate_media(color_scheme="light")
    assert read_colour_scheme(first) == "dark"
    notebook.page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    # what Python sets is drawn: a node of a folded slice, a state
    notebook.run(3)
    first.locator('.node.selected[aria-label^="q_0, 3 nodes"]').wait_for()
    notebook.run(4)
    wait_for_name(first, "x_2_5")
    assert first.locator('[name="head"]').input_value() == "2" and not first.locator('[data-node^="q_0_2"]').count()
    check_reads(first, s.do({"a_0_1_*": Zero()}).attention(1).detach()[2, 5])
    # an unknown node changes nothing
    assert "x_0_0 to x_2_5" in notebook.run(5)
    wait_for_name(first, "x_2_5")
    # two views show the same state, in both directions
    notebook.run(6)
    second = notebook.cell(6)
    wait_for_name(second, "x_2_5")
    second.locator('[data-slice-section=":1"]').click()
    first.locator('[data-node="q_1_2_0"]').wait_for()
    first.locator('[data-node="x_1_1"]').click()
    wait_for_name(second, "x_1_1")
    notebook.run(7)
    second.locator('[data-node="x_0_0"] .fill-do').wait_for()
    assert json.loads(notebook.run(8)) == {"steps": [], "selected": "x_1_1", "view": {"unfolded": [1], "head": 2}}
    return kernel


def read_colour_scheme(cell):
    return cell.locator(".bnet").evaluate("element => getComputedStyle(element).colorScheme")


def wait_for_name(cell, name):
    cell.locator(f'.panel [data-fact="name"]:text-is("{name}")').wait_for()


def check_reads(cell, expected):
    """Check the attention of the selected word in the panel."""
    rows = cell.locator('.panel [data-part="reads-a_1"] tr')
    actual = rows.evaluate_all("rows => rows.map(row => [Number(row.dataset.word), Number(row.dataset.weight)])")
    assert dict(map(tuple, actual)) == {j: pytest.approx(float(p), abs=0.003) for j, p in enumerate(expected)}


def wait_for_saved(file):
    """Wait until the file has the output of the last cell."""
    for _ in range(200):
        if json.loads(file.read_text())["cells"][-1]["outputs"]:
            return
        time.sleep(0.1)
    raise AssertionError("JupyterLab did not save the notebook")


def check_file(file, nbconvert):
    """Check that the saved notebook shows the figure of the widget where no widget runs."""
    notebook = nbformat.read(file, as_version=4)
    data = notebook.cells[0].outputs[0]["data"]
    assert {"image/svg+xml", "text/plain", "application/vnd.jupyter.widget-view+json"} == set(data)
    assert "widgets" not in notebook.metadata
    html, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert len(re.findall(r'src="data:image/svg\+xml;base64,', html)) == 2

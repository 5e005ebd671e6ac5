"""The committed notebooks: each has a question, a picture and a conclusion; and the script that executes them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="make test installs it")

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SIZE = 1_000_000
PICTURES = {"image/png", "image/svg+xml"}


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    content = nbformat.read(request.param, as_version=4)
    nbformat.validate(content)
    return request.param, content


def get_code(content):
    return [cell for cell in content.cells if cell.cell_type == "code"]


def test_a_question_a_picture_and_a_conclusion(notebook):
    path, content = notebook
    first, last = content.cells[0], content.cells[-1]
    assert first.cell_type == last.cell_type == "markdown"
    number = path.stem.partition("_")[0]
    assert re.match(rf"# {number}\. \S.*\n\n(.|\n)*\?", first.source), "a title with its number, then a question"
    assert re.search(r"^## (Conclusion|What holds)", last.source, re.MULTILINE)
    kinds = {kind for cell in get_code(content) for output in cell.outputs for kind in output.get("data", ())}
    assert kinds & PICTURES


def test_every_cell_was_run_once_in_order(notebook):
    _, content = notebook
    assert [cell.execution_count for cell in get_code(content)] == list(range(1, len(get_code(content)) + 1))


def test_outputs_are_of_no_one_machine(notebook):
    path, content = notebook
    for cell in get_code(content):
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
            data = output.get("data", {})
            assert not [kind for kind in data if "widget" in kind], "state of widgets is large: show the figure"
            text = output.get("text", "") + data.get("text/plain", "") + data.get("text/html", "")
            assert not re.search(r"\bat 0x[0-9a-f]{6,}|(?<![\w./:])/(home|root|tmp|work|Users|usr|opt)/", text)
    assert path.stat().st_size < SIZE
    assert set(content.metadata) <= {"kernelspec", "language_info"}


def test_code_parses_and_uses_only_public_names(notebook):
    _, content = notebook
    for cell in get_code(content):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), f"{node.attr} is private"


@pytest.mark.slow
def test_the_runner_writes_once_and_fails_where_a_cell_does(tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    cells = {
        "good": "import random, sys\nprint(1)\nsys.stdout.flush()\nprint(2)",
        "bad": "1 / 0",
        "noisy": "import sys\nprint('noise', file=sys.stderr)\nobject()",
    }
    for name, source in cells.items():
        notebook = new_notebook(cells=[new_markdown_cell("# x"), new_code_cell(source), new_code_cell(source)])
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")

    def run(*names, check=False):
        command = [sys.executable, str(FOLDER / "run.py"), *["--check"] * check]
        command += [str(tmp_path / f"{name}.ipynb") for name in names]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return result.returncode, result.stdout

    before = {name: (tmp_path / f"{name}.ipynb").read_bytes() for name in cells}
    status, printed = run("good", "bad", "noisy")
    assert status == 1 and "ZeroDivisionError" in printed and "stderr: 'noise'" in printed and "at 0x" in printed
    assert all((tmp_path / f"{name}.ipynb").read_bytes() == before[name] for name in ("bad", "noisy"))
    path = tmp_path / "good.ipynb"
    written = path.read_bytes()
    content = nbformat.read(path, as_version=4)
    assert [output.text for cell in get_code(content) for output in cell.outputs] == ["1\n2\n"] * 2
    assert len({cell.id for cell in content.cells}) == 3
    content.cells[1].outputs[0].text = "1\n3\n"
    nbformat.write(content, tmp_path / "other.ipynb")
    content.cells[1].outputs = content.cells[2].outputs = []
    nbformat.write(content, tmp_path / "empty.ipynb")
    status, printed = run("good", "other", "empty", check=True)
    assert status == 1 and "as committed" in printed and "prints '2' where '3' is committed" in printed
    assert "without outputs" in printed and path.read_bytes() == written

"""The notebooks as they are committed: each has a question, a picture and a conclusion; and what executes them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="make test installs it")

HOME = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(HOME.glob("*.ipynb"))
SIZE = 1_000_000
PICTURES = {"image/png", "image/svg+xml"}


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    retained = nbformat.read(request.param, as_version=4)
    nbformat.validate(retained)
    return request.param, retained


def code(retained):
    return [cell for cell in retained.cells if cell.cell_type == "code"]


def test_a_question_a_picture_and_a_conclusion(notebook):
    path, retained = notebook
    first, last = retained.cells[0], retained.cells[-1]
    assert first.cell_type == last.cell_type == "markdown"
    assert re.match(rf"# {path.stem[0]}\. \S.*\n\n(.|\n)*\?", first.source), "a title with its number, then a question"
    assert re.search(r"^## (Conclusion|What holds)", last.source, re.MULTILINE)
    kinds = {kind for cell in code(retained) for output in cell.outputs for kind in output.get("data", ())}
    assert kinds & PICTURES


def test_every_cell_was_run_once_in_order(notebook):
    _, retained = notebook
    assert [cell.execution_count for cell in code(retained)] == list(range(1, len(code(retained)) + 1))


def test_outputs_are_of_no_one_machine(notebook):
    path, retained = notebook
    for cell in code(retained):
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
            data = output.get("data", {})
            assert not [kind for kind in data if "widget" in kind], "state of widgets is large: show the figure"
            given = output.get("text", "") + data.get("text/plain", "") + data.get("text/html", "")
            assert not re.search(r"\bat 0x[0-9a-f]{6,}|(?<![\w./:])/(home|root|tmp|work|Users|usr|opt)/", given)
    assert path.stat().st_size < SIZE
    assert set(retained.metadata) <= {"kernelspec", "language_info"}


def test_code_parses_and_asks_the_public_names_alone(notebook):
    _, retained = notebook
    for cell in code(retained):
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
        created = new_notebook(cells=[new_markdown_cell("# x"), new_code_cell(source), new_code_cell(source)])
        nbformat.write(created, tmp_path / f"{name}.ipynb")

    def run(*names, check=False):
        command = [sys.executable, str(HOME / "run.py"), *["--check"] * check]
        command += [str(tmp_path / f"{name}.ipynb") for name in names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout

    before = {name: (tmp_path / f"{name}.ipynb").read_bytes() for name in cells}
    failed, given = run("good", "bad", "noisy")
    assert failed == 1 and "ZeroDivisionError" in given and "stderr: 'noise'" in given and "at 0x" in given
    assert all((tmp_path / f"{name}.ipynb").read_bytes() == before[name] for name in ("bad", "noisy"))
    valid = tmp_path / "good.ipynb"
    written = valid.read_bytes()
    retained = nbformat.read(valid, as_version=4)
    assert [output.text for cell in code(retained) for output in cell.outputs] == ["1\n2\n"] * 2
    assert len({cell.id for cell in retained.cells}) == 3
    retained.cells[1].outputs[0].text = "1\n3\n"
    nbformat.write(retained, tmp_path / "other.ipynb")
    retained.cells[1].outputs = retained.cells[2].outputs = []
    nbformat.write(retained, tmp_path / "empty.ipynb")
    failed, given = run("good", "other", "empty", check=True)
    assert failed == 1 and "as committed" in given and "prints '2' where '3' is committed" in given
    assert "without outputs" in given and valid.read_bytes() == written

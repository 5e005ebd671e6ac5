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
    kept = nbformat.read(request.param, as_version=4)
    nbformat.validate(kept)
    return request.param, kept


def code(kept):
    return [cell for cell in kept.cells if cell.cell_type == "code"]


def test_a_question_a_picture_and_a_conclusion(notebook):
    path, kept = notebook
    first, last = kept.cells[0], kept.cells[-1]
    assert first.cell_type == last.cell_type == "markdown"
    assert re.match(rf"# {path.stem[0]}\. \S.*\n\n(.|\n)*\?", first.source), "a title with its number, then a question"
    assert re.search(r"^## (Conclusion|What holds)", last.source, re.MULTILINE)
    kinds = {kind for cell in code(kept) for output in cell.outputs for kind in output.get("data", ())}
    assert kinds & PICTURES


def test_every_cell_was_run_once_in_order(notebook):
    _, kept = notebook
    assert [cell.execution_count for cell in code(kept)] == list(range(1, len(code(kept)) + 1))


def test_outputs_are_of_no_one_machine(notebook):
    path, kept = notebook
    for cell in code(kept):
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
            data = output.get("data", {})
            assert not [kind for kind in data if "widget" in kind], "state of widgets is large: show the figure"
            told = output.get("text", "") + data.get("text/plain", "") + data.get("text/html", "")
            assert not re.search(r"\bat 0x[0-9a-f]{6,}|(?<![\w./:])/(home|root|tmp|work|Users|usr|opt)/", told)
    assert path.stat().st_size < SIZE
    assert set(kept.metadata) <= {"kernelspec", "language_info"}


def test_code_parses_and_asks_the_public_names_alone(notebook):
    _, kept = notebook
    for cell in code(kept):
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
        made = new_notebook(cells=[new_markdown_cell("# x"), new_code_cell(source), new_code_cell(source)])
        nbformat.write(made, tmp_path / f"{name}.ipynb")

    def run(*names, check=False):
        command = [sys.executable, str(HOME / "run.py"), *["--check"] * check]
        command += [str(tmp_path / f"{name}.ipynb") for name in names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout

    before = {name: (tmp_path / f"{name}.ipynb").read_bytes() for name in cells}
    failed, told = run("good", "bad", "noisy")
    assert failed == 1 and "ZeroDivisionError" in told and "stderr: 'noise'" in told and "at 0x" in told
    assert all((tmp_path / f"{name}.ipynb").read_bytes() == before[name] for name in ("bad", "noisy"))
    good = tmp_path / "good.ipynb"
    written = good.read_bytes()
    kept = nbformat.read(good, as_version=4)
    assert [output.text for cell in code(kept) for output in cell.outputs] == ["1\n2\n"] * 2
    assert len({cell.id for cell in kept.cells}) == 3
    kept.cells[1].outputs[0].text = "1\n3\n"
    nbformat.write(kept, tmp_path / "other.ipynb")
    kept.cells[1].outputs = kept.cells[2].outputs = []
    nbformat.write(kept, tmp_path / "empty.ipynb")
    failed, told = run("good", "other", "empty", check=True)
    assert failed == 1 and "as committed" in told and "prints '2' where '3' is committed" in told
    assert "without outputs" in told and good.read_bytes() == written

